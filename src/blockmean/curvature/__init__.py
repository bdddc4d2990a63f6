"""Curvature of a model's loss on data in block-mean form: Fisher, Gauss-Newton and Hessian, never d × d.

fisher.py   empirical_fisher, fisher: from the gradients of single samples
ggn.py      ggn: from derivatives of the outputs along block indicators
hessian.py  hessian: from Hessian-vector products
report.py   Curvature, which they return: a BlockMean and a report of its scaling, errors and explained share
"""

from blockmean.curvature.fisher import empirical_fisher, fisher
from blockmean.curvature.ggn import ggn
from blockmean.curvature.hessian import hessian
from blockmean.curvature.report import Curvature, Report

__all__ = ["Curvature", "Report", "empirical_fisher", "fisher", "ggn", "hessian"]
