// The functions of watch.cpp, for the module.
#pragma once

struct PyMethodDef;
extern PyMethodDef blockmean_watch_methods[];
