"""axolotl with Anova: a plugin that tells axolotl's trainer which optimizer to make.

Copy examples/recipes/axolotl_plugin.py to where Python finds it, and name the plugin in the configuration of a run:

    plugins:
      - axolotl_plugin.AnovaPlugin
    learning_rate: 1e-3
    weight_decay: 0.1

axolotl calls `post_trainer_create` of every plugin. Plugins have a method `create_optimizer`, too, but we found nothing
in axolotl that calls it. The trainer is Hugging Face's: we have tested the plugin with that one, not inside axolotl.
"""

from axolotl.integrations.base import BasePlugin

from blockmean import Anova


class AnovaPlugin(BasePlugin):
    """Makes Anova with the learning rate of the configuration; the trainer adds its groups and the weight decay."""

    def post_trainer_create(self, cfg, trainer):
        trainer.optimizer_cls_and_kwargs = (Anova, {"lr": cfg.learning_rate})
