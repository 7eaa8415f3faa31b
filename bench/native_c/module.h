/* A Python module around `reset()` and `step(x, y)`: load(packed), reset(), step(x, y), many(x, y, events). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *py_load(PyObject *self, PyObject *const *args, Py_ssize_t num) {
  Py_buffer from;
  (void)self;
  if (num != 1 || PyObject_GetBuffer(args[0], &from, PyBUF_SIMPLE)) return NULL;
  int fits = from.len == (Py_ssize_t)sizeof weights;
  if (fits) memcpy(&weights, from.buf, sizeof weights);
  PyBuffer_Release(&from);
  reset();
  if (!fits) return PyErr_Format(PyExc_ValueError, "the packed weights are %zd bytes, not %zu", from.len, sizeof weights);
  Py_RETURN_NONE;
}

static PyObject *py_reset(PyObject *self, PyObject *none) {
  (void)self, (void)none;
  reset();
  Py_RETURN_NONE;
}

static PyObject *run(PyObject *const *args, Py_ssize_t events) {
  Py_buffer x, y;
  if (PyObject_GetBuffer(args[0], &x, PyBUF_SIMPLE)) return NULL;
  if (PyObject_GetBuffer(args[1], &y, PyBUF_WRITABLE)) return PyBuffer_Release(&x), NULL;
  int fits = x.len == events * INPUTS * 4 && y.len == events * OUTPUTS * 4;
  if (fits)
    for (Py_ssize_t t = 0; t < events; t++) step((const float *)x.buf + t * INPUTS, (float *)y.buf + t * OUTPUTS);
  PyBuffer_Release(&x), PyBuffer_Release(&y);
  if (!fits) return PyErr_Format(PyExc_ValueError, "a buffer is not of %zd events", events);
  Py_RETURN_NONE;
}

static PyObject *py_step(PyObject *self, PyObject *const *args, Py_ssize_t num) {
  (void)self;
  return num == 2 ? run(args, 1) : PyErr_Format(PyExc_TypeError, "step(x, y)");
}

static PyObject *py_many(PyObject *self, PyObject *const *args, Py_ssize_t num) {
  (void)self;
  return num == 3 ? run(args, PyLong_AsSsize_t(args[2])) : PyErr_Format(PyExc_TypeError, "many(x, y, events)");
}

static PyMethodDef methods[] = {{"load", (PyCFunction)(void *)py_load, METH_FASTCALL, NULL},
                                {"reset", py_reset, METH_NOARGS, NULL},
                                {"step", (PyCFunction)(void *)py_step, METH_FASTCALL, NULL},
                                {"many", (PyCFunction)(void *)py_many, METH_FASTCALL, NULL},
                                {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "peer", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_peer(void) { return PyModule_Create(&module); }
