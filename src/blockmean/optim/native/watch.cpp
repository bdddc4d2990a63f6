// watch.py in C++: the same questions to the same Python objects, without an interpreter between them.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "watch.hpp"

namespace {

struct Owned {  // a reference that ends with its scope
    PyObject* object;
    explicit Owned(PyObject* object) : object(object) {}
    ~Owned() { Py_XDECREF(object); }
    Owned(const Owned&) = delete;
    operator PyObject*() const { return object; }
};

struct Names {
    PyObject *grad, *data_ptr, *nbytes, *shape, *dtype, *is_neg, *is_contiguous, *stride;
    Names()
        : grad(PyUnicode_InternFromString("grad")), data_ptr(PyUnicode_InternFromString("data_ptr")),
          nbytes(PyUnicode_InternFromString("nbytes")), shape(PyUnicode_InternFromString("shape")),
          dtype(PyUnicode_InternFromString("dtype")), is_neg(PyUnicode_InternFromString("is_neg")),
          is_contiguous(PyUnicode_InternFromString("is_contiguous")), stride(PyUnicode_InternFromString("stride")) {}
};

const Names& names() {
    static const Names all;
    return all;
}

PyObject* call(PyObject* object, PyObject* method) { return PyObject_CallMethodObjArgs(object, method, nullptr); }

bool equal(PyObject* a, PyObject* b) { return a && PyObject_RichCompareBool(a, b, Py_EQ) == 1; }

// True, or the strides of a tensor that is not contiguous.
bool lies_like(PyObject* tensor, PyObject* known) {
    Owned contiguous(call(tensor, names().is_contiguous));
    if (!contiguous) return false;
    if (contiguous == Py_True || known == Py_True) return contiguous == known;
    return equal(Owned(call(tensor, names().stride)), known);
}

bool same_param(PyObject* param, PyObject* kind) {  // (shape, strides)
    return equal(Owned(PyObject_GetAttr(param, names().shape)), PyTuple_GetItem(kind, 0)) &&
           lies_like(param, PyTuple_GetItem(kind, 1));
}

// (type, dtype, negated, shape, strides). A sparse gradient is not contiguous, or does not say.
bool same_gradient(PyObject* grad, PyObject* kind) {
    return reinterpret_cast<PyObject*>(Py_TYPE(grad)) == PyTuple_GetItem(kind, 0) &&
           Owned(PyObject_GetAttr(grad, names().dtype)) == PyTuple_GetItem(kind, 1) &&
           Owned(call(grad, names().is_neg)) == PyTuple_GetItem(kind, 2) &&
           equal(Owned(PyObject_GetAttr(grad, names().shape)), PyTuple_GetItem(kind, 3)) &&
           lies_like(grad, PyTuple_GetItem(kind, 4));
}

bool same_number(PyObject* a, PyObject* known) {
    return a && PyLong_AsUnsignedLongLong(a) == PyLong_AsUnsignedLongLong(known);
}

// The values of a dict whose keys are asked for in about the order they were stored in. A look-up would call the hash
// function of torch, which is written in Python and takes longer than all other questions about a tensor.
struct InOrder {
    PyObject* dict;
    Py_ssize_t place = 0;
    bool in_order = true;

    PyObject* find(PyObject* wanted) {
        PyObject *key, *value;
        while (in_order && PyDict_Next(dict, &place, &key, &value))
            if (key == wanted) return value;
        in_order = false;  // after all, so that nothing is searched twice
        return PyDict_GetItemWithError(dict, wanted);
    }
};

// (params, states, seen, own, things, addresses, sizes, kinds, gradients) → the gradients of all that take part; None if
// anything is not as it was. `seen` has the parameters, `own` the state of each or None, `things` the parameters that take
// part and all that is in their states; an address or a size of None is not compared.
PyObject* unchanged(PyObject*, PyObject* args) {
    PyObject *params, *states, *all, *own, *things, *addresses, *sizes, *kinds, *gradients;
    if (!PyArg_ParseTuple(args, "OOOOOOOOO", &params, &states, &all, &own, &things, &addresses, &sizes, &kinds, &gradients))
        return nullptr;
    const Py_ssize_t count = PyList_Size(params), total = PyList_Size(things);
    bool same = count == PyList_Size(own);
    Py_ssize_t thing = 0, member = 0;
    InOrder stored{states};
    Owned found(PyList_New(PyList_Size(kinds)));
    if (!found) return nullptr;
    const auto seen = [&](PyObject* object) {
        if (thing >= total || PyList_GetItem(things, thing) != object) return false;
        PyObject *address = PyList_GetItem(addresses, thing), *size = PyList_GetItem(sizes, thing);
        ++thing;
        return (address == Py_None || same_number(Owned(call(object, names().data_ptr)), address)) &&
               (size == Py_None || same_number(Owned(PyObject_GetAttr(object, names().nbytes)), size));
    };
    for (Py_ssize_t i = 0; same && i < count; ++i) {
        PyObject *param = PyList_GetItem(params, i), *state = PyList_GetItem(own, i);
        if (!(same = param == PyList_GetItem(all, i))) break;
        Owned grad(PyObject_GetAttr(param, names().grad));
        if (!grad || grad == Py_None || state == Py_None) {
            same = grad == Py_None && state == Py_None;
            continue;
        }
        same = stored.find(param) == state && seen(param) &&
               same_param(param, PyList_GetItem(kinds, member)) && same_gradient(grad, PyList_GetItem(gradients, member));
        if (same) PyList_SetItem(found, member++, Py_NewRef(grad));
        PyObject *key, *value;
        Py_ssize_t place = 0;
        while (same && PyDict_Next(state, &place, &key, &value)) same = seen(value);
    }
    PyErr_Clear();  // a tensor that cannot answer is not the one seen before
    return Py_NewRef(same && thing == total ? found.object : Py_None);
}

}  // namespace

PyMethodDef blockmean_watch_methods[] = {
    {"unchanged", unchanged, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
