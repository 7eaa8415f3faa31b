/* Calls a model's library (struct flatout_native) from Python without a temporary object on the way.
 *
 * Weights  the packed numbers, in memory of their own; shared by the callers made from it; set() gives all of them other numbers.
 * Caller   one stream: state, working memory, and where the weights are.
 * Streams  n streams, stepped together.
 *
 * step holds Python's lock. step_many lets go of it, so it takes a reference to the numbers it began with, and a flag refuses every
 * other call on the same object meanwhile. No Python code can run between the look at that flag and the step: pointers are gathered,
 * and outputs made, before.
 *
 * NumPy arrays are read through the fields of their struct (the same in NumPy 1 and 2; checked once against the buffer protocol),
 * torch tensors through their methods, all else through the buffer protocol.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PORTS 128
#define ALIGNMENT 64

#include "table.h"

/* ------------------------------------------------------------------------------------------------------------------ weights */

/* Numbers that never change: a call that runs without the lock holds a reference. */
typedef struct {
  PyObject_HEAD
  void *data;
  Py_ssize_t size;
} Numbers;

typedef struct {
  PyObject_HEAD
  Numbers *numbers;
} Weights;

static PyTypeObject Numbers_type, Weights_type;

static void *aligned(uint64_t size) {
  void *data = NULL;
  uint64_t whole = (size + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
  if (posix_memalign(&data, ALIGNMENT, whole)) {
    PyErr_NoMemory();
    return NULL;
  }
  return memset(data, 0, whole);
}

static void Numbers_dealloc(Numbers *self) {
  free(self->data);
  PyObject_Free(self);
}

static Numbers *numbers_of(PyObject *source) {
  Py_buffer view;
  if (PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)) return NULL;
  Numbers *made = PyObject_New(Numbers, &Numbers_type);
  if (made) {
    made->size = view.len;
    made->data = aligned(view.len);
    if (made->data)
      memcpy(made->data, view.buf, view.len);
    else
      Py_CLEAR(made);
  }
  PyBuffer_Release(&view);
  return made;
}

static PyObject *Weights_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *source;
  static char *names[] = {"packed", NULL};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &source)) return NULL;
  Weights *self = (Weights *)type->tp_alloc(type, 0);
  if (self && !(self->numbers = numbers_of(source))) Py_CLEAR(self);
  return (PyObject *)self;
}

static void Weights_dealloc(Weights *self) {
  Py_XDECREF(self->numbers);
  Py_TYPE(self)->tp_free(self);
}

static PyObject *Weights_set(Weights *self, PyObject *source) {
  Numbers *made = numbers_of(source);
  if (!made) return NULL;
  if (made->size != self->numbers->size) {
    PyErr_Format(PyExc_ValueError, "%zd bytes of weights, %zd are needed", made->size, self->numbers->size);
    Py_DECREF(made);
    return NULL;
  }
  Numbers *before = self->numbers;
  self->numbers = made; /* one pointer, under the lock: a call has either the old numbers or the new */
  Py_DECREF(before);
  Py_RETURN_NONE;
}

static PyObject *Weights_packed(Weights *self, PyObject *unused) {
  (void)unused;
  return PyBytes_FromStringAndSize(self->numbers->data, self->numbers->size);
}

/* -------------------------------------------------------------------------------------------------------------------- ports */

typedef struct {
  PyObject *name, *dtype, *shape; /* shape: a tuple */
  Py_ssize_t bytes;               /* of one event */
  Py_ssize_t itemsize;
  const char *formats; /* letters of the struct module that mean this type, for this itemsize */
  int num, num_too;    /* NumPy's numbers of this type */
  int kind;            /* of KINDS */
} Port;

static const struct {
  const char *name;
  Py_ssize_t itemsize;
  const char *formats;
  int num, num_too;
} KINDS[] = {
    {"float32", 4, "f", 11, 11},
    {"int32", 4, "il", 5, 5},
    {"int64", 8, "lq", 7, 9}, /* NPY_LONG, NPY_LONGLONG */
    {"bool", 1, "?", 0, 0},
};
#define NUM_KINDS (sizeof KINDS / sizeof *KINDS)

typedef struct {
  PyObject_HEAD
  const flatout_native *model;
  Weights *weights;
  char *state, *work;
  int64_t num; /* streams; 0: a Caller */
  int busy;
  Py_ssize_t ins, outs;
  Port *ports;         /* inputs, then outputs */
  PyObject *wrong;     /* class of errors about what was given */
  PyObject *occupied;  /* class of the error of a call while another thread is in step_many */
  PyObject *arguments; /* (model's address, weights, inputs, outputs, errors): what a copy is made of */
} Caller;

static PyTypeObject Caller_type, Streams_type;

static int port_init(Port *port, PyObject *described, uint64_t bytes) {
  const char *dtype;
  PyObject *shape;
  if (!PyArg_ParseTuple(described, "UsO!", &port->name, &dtype, &PyTuple_Type, &shape)) return -1;
  Py_INCREF(port->name);
  port->shape = Py_NewRef(shape);
  for (size_t i = 0; i < NUM_KINDS; i++)
    if (!strcmp(dtype, KINDS[i].name)) {
      port->kind = i;
      port->itemsize = KINDS[i].itemsize;
      port->formats = KINDS[i].formats;
      port->num = KINDS[i].num;
      port->num_too = KINDS[i].num_too;
    }
  if (!port->formats) return PyErr_Format(PyExc_ValueError, "dtype '%s' of '%U' is not known", dtype, port->name), -1;
  if (!(port->dtype = PyUnicode_InternFromString(dtype))) return -1;
  port->bytes = port->itemsize;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) {
    Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
    if (length == -1 && PyErr_Occurred()) return -1;
    port->bytes *= length;
  }
  if ((uint64_t)port->bytes == bytes) return 0;
  PyErr_Format(PyExc_ValueError, "'%U' has %zd bytes by its shape, %zd in the library", port->name, port->bytes, (Py_ssize_t)bytes);
  return -1;
}

/* ------------------------------------------------------------------------------------------------- arrays, tensors, buffers */

/* How NumPy lays out an array and what describes its type: PyArrayObject_fields and the head of PyArray_Descr. */
typedef struct {
  PyObject_HEAD
  PyTypeObject *typeobj;
  char kind, type, byteorder, flags;
  int type_num;
} Descr;

typedef struct {
  PyObject_HEAD
  char *data;
  int nd;
  Py_ssize_t *dims, *strides;
  PyObject *owner;
  Descr *descr;
  int flags;
} Array;

#define ARRAY_CONTIGUOUS 0x0001
#define ARRAY_WRITEABLE 0x0400

static PyTypeObject *array_type, *tensor_type; /* numpy.ndarray, once its layout was checked, and torch.Tensor */
static int array_refused;                      /* the layout was not as above */
static PyObject *tensor_dtypes[NUM_KINDS];      /* torch's */
static PyObject *numpy_empty;
static PyObject *s_out, *s_is_cpu, *s_is_contiguous, *s_is_neg, *s_dtype, *s_nbytes, *s_data_ptr;

typedef struct {
  char *data;
  Py_ssize_t bytes;
  int held; /* `view` is to be released */
  Py_buffer view;
} Found;

/* The bytes of `object`, if it is an array of the port's type that lies in one piece; else -1. */
static inline Py_ssize_t array_bytes(PyObject *object, const Port *port, int flags) {
  if (Py_TYPE(object) != array_type) return -1;
  const Array *array = (const Array *)object;
  const Descr *descr = array->descr;
  if ((array->flags & flags) != flags || (descr->type_num != port->num && descr->type_num != port->num_too)) return -1;
  if (descr->byteorder != '=' && descr->byteorder != '|') return -1;
  Py_ssize_t bytes = port->itemsize;
  for (int i = 0; i < array->nd; i++) bytes *= array->dims[i];
  return bytes;
}

static int layout_is_known(PyObject *array) {
  Py_buffer view;
  const Array *fields = (const Array *)array;
  if (PyObject_GetBuffer(array, &view, PyBUF_FULL)) return 0;
  int same = fields->data == view.buf && fields->nd == 2 && fields->dims[0] == 2 && fields->dims[1] == 3 &&
             fields->strides[0] == view.strides[0] && fields->strides[1] == 4 && fields->descr->type_num == 11 &&
             fields->descr->byteorder == '=' && (fields->flags & ARRAY_CONTIGUOUS) && (fields->flags & ARRAY_WRITEABLE);
  PyBuffer_Release(&view);
  return same;
}

/* The attribute of a module that somebody has imported; NULL without an error where nobody has. */
static PyObject *of_imported(const char *module, const char *name) {
  PyObject *modules = PyImport_GetModuleDict(); /* borrowed */
  PyObject *found = PyDict_GetItemString(modules, module);
  PyObject *attribute = found ? PyObject_GetAttrString(found, name) : NULL;
  if (!attribute) PyErr_Clear(); /* half imported: not there yet */
  return attribute;
}

/* Look for NumPy and torch among what is imported. They are never imported here. */
static void meet_types(void) {
  if (!array_type && !array_refused) {
    PyObject *type = of_imported("numpy", "ndarray"), *empty = of_imported("numpy", "empty");
    PyObject *array = type && empty ? PyObject_CallFunction(empty, "(ii)s", 2, 3, "f4") : NULL;
    if (array && (PyObject *)Py_TYPE(array) == type) {
      if (layout_is_known(array))
        array_type = (PyTypeObject *)Py_NewRef(type);
      else
        array_refused = 1;
    }
    PyErr_Clear();
    Py_XDECREF(array);
    Py_XDECREF(empty);
    Py_XDECREF(type);
  }
  if (!tensor_type) {
    PyObject *type = of_imported("torch", "Tensor");
    int whole = type && PyType_Check(type);
    for (size_t i = 0; whole && i < NUM_KINDS; i++) whole = (tensor_dtypes[i] = of_imported("torch", KINDS[i].name)) != NULL;
    if (whole)
      tensor_type = (PyTypeObject *)type;
    else
      Py_XDECREF(type);
  }
}

static int is_true(PyObject *value) {
  int truth = value ? PyObject_IsTrue(value) : -1;
  Py_XDECREF(value);
  return truth;
}

static Py_ssize_t is_number(PyObject *value) {
  Py_ssize_t number = value ? (Py_ssize_t)PyLong_AsUnsignedLongLong(value) : -1;
  Py_XDECREF(value);
  return number;
}

static int refuse(Caller *self, const Port *port, const char *what) {
  if (!PyErr_Occurred()) PyErr_Format(self->wrong, "'%U' (%U, %zd bytes an event): %s", port->name, port->dtype, port->bytes, what);
  return -1;
}

static int find_tensor(Caller *self, PyObject *tensor, const Port *port, Found *found) {
  int on_cpu = is_true(PyObject_GetAttr(tensor, s_is_cpu));
  if (on_cpu != 1) return refuse(self, port, "got a tensor that is not on the CPU; give tensor.cpu()");
  if (is_true(PyObject_CallMethodNoArgs(tensor, s_is_contiguous)) != 1)
    return refuse(self, port, "got a tensor that is not contiguous; give tensor.contiguous()");
  PyObject *dtype = PyObject_GetAttr(tensor, s_dtype);
  if (!dtype) return -1;
  int same = dtype == tensor_dtypes[port->kind];
  if (!same) PyErr_Format(self->wrong, "'%U' is %U, got a tensor of %S; convert it", port->name, port->dtype, dtype);
  Py_DECREF(dtype);
  if (!same) return -1;
  if (is_true(PyObject_CallMethodNoArgs(tensor, s_is_neg)) != 0)
    return refuse(self, port, "got a tensor whose sign is still to be turned; give tensor.resolve_neg()");
  found->bytes = is_number(PyObject_GetAttr(tensor, s_nbytes));
  if (PyErr_Occurred()) return -1;
  found->data = (char *)is_number(PyObject_CallMethodNoArgs(tensor, s_data_ptr));
  return PyErr_Occurred() ? -1 : 0;
}

static int format_fits(const Py_buffer *view, const Port *port) {
  const char *format = view->format ? view->format : "B";
#if PY_LITTLE_ENDIAN
  if (*format == '@' || *format == '=' || *format == '<') format++;
#else
  if (*format == '@' || *format == '=' || *format == '>' || *format == '!') format++;
#endif
  if (!format[0] || format[1]) return 0;
  if (strchr("Bbc", *format)) return 1; /* bytes: whoever gives them knows what they are */
  return view->itemsize == port->itemsize && strchr(port->formats, *format) != NULL;
}

static int find_buffer(Caller *self, PyObject *object, const Port *port, int writes, Found *found) {
  if (!PyObject_CheckBuffer(object)) {
    PyErr_Format(self->wrong, "'%U' (%U, %zd bytes an event): got '%s'; give a NumPy array, a tensor on the CPU or bytes", port->name,
                 port->dtype, port->bytes, Py_TYPE(object)->tp_name);
    return -1;
  }
  if (PyObject_GetBuffer(object, &found->view, PyBUF_FULL_RO)) {
    PyObject *type, *value, *trace; /* such as NumPy's for a datetime */
    PyErr_Fetch(&type, &value, &trace);
    PyErr_Format(self->wrong, "'%U' (%U, %zd bytes an event): %S", port->name, port->dtype, port->bytes, value ? value : type);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
  }
  found->held = 1;
  if (!PyBuffer_IsContiguous(&found->view, 'C'))
    return refuse(self, port, "got a buffer that is not contiguous; give numpy.ascontiguousarray(x)");
  if (!format_fits(&found->view, port)) {
    PyErr_Format(self->wrong, "'%U' is %U, got a buffer of format '%s' with %zd bytes a number; convert it", port->name, port->dtype,
                 found->view.format ? found->view.format : "B", found->view.itemsize);
    return -1;
  }
  if (writes && found->view.readonly) return refuse(self, port, "got an output that is read-only");
  found->data = found->view.buf;
  found->bytes = found->view.len;
  return 0;
}

static int find(Caller *self, PyObject *object, const Port *port, int writes, Found *found) {
  if (Py_TYPE(object) != array_type && (!tensor_type || !array_type)) meet_types();
  if (tensor_type && PyType_IsSubtype(Py_TYPE(object), tensor_type)) return find_tensor(self, object, port, found);
  return find_buffer(self, object, port, writes, found);
}

/* -------------------------------------------------------------------------------------------------------------------- calls */

/* What one call was given: its arrays lie on the stack of step and step_many. */
typedef struct {
  PyObject *const *given; /* inputs, then outputs (own references, when `made`) */
  PyObject **outs;
  PyObject *result; /* own reference: what the call returns */
  Found *found;
  const void **in;
  void **out;
} Call;

#define CALL_OF(self, call)                                                        \
  PyObject *call##_outs[(self)->outs + 1];                                         \
  Found call##_found[(self)->ins + (self)->outs + 1];                              \
  const void *call##_in[(self)->ins + 1];                                          \
  void *call##_out[(self)->outs + 1];                                              \
  Call call = {NULL, call##_outs, NULL, call##_found, call##_in, call##_out}

static PyObject *occupied(Caller *self) {
  PyErr_SetString(self->occupied, "this engine is stepping in another thread; make another with streams or copy()");
  return NULL;
}

/* Sort arguments into inputs and outputs. `call->outs[0]` is NULL where outputs are to be made. */
static int sort_arguments(Caller *self, Call *call, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
  PyObject *out = NULL;
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
    PyObject *name = PyTuple_GET_ITEM(names, i);
    if (name != s_out && PyUnicode_Compare(name, s_out))
      return PyErr_Format(PyExc_TypeError, "got an argument '%U'; inputs go by position, outputs too or as out=", name), -1;
    out = args[nargs + i];
  }
  if (out == Py_None) out = NULL;
  call->given = args;
  call->outs[0] = NULL;
  int by_position = nargs == self->ins + self->outs && self->outs && !out;
  if (!by_position && nargs != self->ins)
    return PyErr_Format(PyExc_TypeError, "got %zd arguments; give %zd inputs, then out= or %zd outputs by position", nargs, self->ins,
                        self->outs),
           -1;
  if (by_position) {
    for (Py_ssize_t i = 0; i < self->outs; i++) call->outs[i] = args[self->ins + i];
  } else if (out && PyTuple_Check(out)) {
    if (PyTuple_GET_SIZE(out) != self->outs)
      return PyErr_Format(PyExc_TypeError, "out has %zd buffers; give %zd", PyTuple_GET_SIZE(out), self->outs), -1;
    for (Py_ssize_t i = 0; i < self->outs; i++) call->outs[i] = PyTuple_GET_ITEM(out, i);
    call->result = Py_NewRef(out);
  } else if (out) {
    if (self->outs != 1) return PyErr_Format(PyExc_TypeError, "out is one buffer; give a tuple of %zd", self->outs), -1;
    call->outs[0] = out;
  }
  return 0;
}

static PyObject *shape_of(const Port *port, int64_t num, int64_t events) {
  Py_ssize_t lead = (num > 0) + (events >= 0), length = PyTuple_GET_SIZE(port->shape), at = 0;
  PyObject *shape = PyTuple_New(lead + length);
  if (!shape) return NULL;
  if (events >= 0) PyTuple_SET_ITEM(shape, at++, PyLong_FromLongLong(events));
  if (num > 0) PyTuple_SET_ITEM(shape, at++, PyLong_FromLongLong(num));
  for (Py_ssize_t i = 0; i < length; i++) PyTuple_SET_ITEM(shape, at++, Py_NewRef(PyTuple_GET_ITEM(port->shape, i)));
  if (PyErr_Occurred()) Py_CLEAR(shape);
  return shape;
}

static PyObject *new_array(const Port *port, int64_t num, int64_t events) {
  if (!numpy_empty) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    numpy_empty = numpy ? PyObject_GetAttrString(numpy, "empty") : NULL;
    Py_XDECREF(numpy);
    if (!numpy_empty) return NULL;
    meet_types();
  }
  PyObject *shape = num > 0 || events >= 0 ? shape_of(port, num, events) : Py_NewRef(port->shape);
  if (!shape) return NULL;
  PyObject *arguments[] = {shape, port->dtype};
  PyObject *made = PyObject_Vectorcall(numpy_empty, arguments, 2, NULL);
  Py_DECREF(shape);
  return made;
}

/* Outputs where none were given, and what the call returns. `events` < 0: one event, without that dimension. */
static int make_outputs(Caller *self, Call *call, int64_t events) {
  int make = self->outs && !call->outs[0];
  if (call->result) return 0;
  if (self->outs == 1) {
    call->result = make ? new_array(self->ports + self->ins, self->num, events) : Py_NewRef(call->outs[0]);
    call->outs[0] = call->result;
    return call->result ? 0 : -1;
  }
  if (!(call->result = PyTuple_New(self->outs))) return -1;
  for (Py_ssize_t i = 0; i < self->outs; i++) {
    if (make)
      call->outs[i] = new_array(self->ports + self->ins + i, self->num, events);
    else
      Py_INCREF(call->outs[i]);
    if (!call->outs[i]) return -1;
    PyTuple_SET_ITEM(call->result, i, call->outs[i]);
  }
  return 0;
}

static void release(Found *found, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++)
    if (found[i].held) PyBuffer_Release(&found[i].view);
}

static int wrong_size(Caller *self, const Port *port, Py_ssize_t got, int64_t events) {
  if (self->num)
    PyErr_Format(self->wrong, "'%U' is %U of shape %R: got %zd bytes, expected %zd x %zd (of %zd events in each of %zd streams)",
                 port->name, port->dtype, port->shape, got, (Py_ssize_t)(events * self->num), port->bytes, (Py_ssize_t)events,
                 (Py_ssize_t)self->num);
  else if (events == 1)
    PyErr_Format(self->wrong, "'%U' is %U of shape %R: got %zd bytes, expected %zd", port->name, port->dtype, port->shape, got,
                 port->bytes);
  else
    PyErr_Format(self->wrong, "'%U' is %U of shape %R: got %zd bytes, expected %zd x %zd (of %zd events)", port->name, port->dtype,
                 port->shape, got, (Py_ssize_t)events, port->bytes, (Py_ssize_t)events);
  return -1;
}

/* Sizes of what was found, and that nothing that is written lies over something else that was given. */
static int check_found(Caller *self, Call *call, int64_t events) {
  Py_ssize_t all = self->ins + self->outs;
  int64_t times = events * (self->num ? self->num : 1);
  for (Py_ssize_t i = 0; i < all; i++) {
    if (call->found[i].bytes != self->ports[i].bytes * times)
      return wrong_size(self, self->ports + i, call->found[i].bytes, events);
    if (i < self->ins)
      call->in[i] = call->found[i].data;
    else
      call->out[i - self->ins] = call->found[i].data;
  }
  for (Py_ssize_t o = self->ins; o < all; o++)
    for (Py_ssize_t i = 0; i < o; i++) {
      const Found *a = call->found + o, *b = call->found + i;
      if (a->bytes && b->bytes && a->data < b->data + b->bytes && b->data < a->data + a->bytes)
        return PyErr_Format(self->wrong, "output '%U' lies in the memory of '%U'; give it memory of its own", self->ports[o].name,
                            self->ports[i].name),
               -1;
    }
  return 0;
}

/* Everything by way of the protocols: what was found is held until release(). */
static int find_each(Caller *self, Call *call, Py_ssize_t from, Py_ssize_t until) {
  for (Py_ssize_t i = from; i < until; i++) {
    PyObject *object = i < self->ins ? call->given[i] : call->outs[i - self->ins];
    call->found[i].held = 0;
    if (find(self, object, self->ports + i, i >= self->ins, call->found + i)) {
      release(call->found + from, i - from + 1);
      return -1;
    }
  }
  return 0;
}

/* All of it NumPy arrays that fit: their memory, read without a call into Python. */
static int find_arrays(Caller *self, Call *call) {
  for (Py_ssize_t i = 0; i < self->ins + self->outs; i++) {
    PyObject *object = i < self->ins ? call->given[i] : call->outs[i - self->ins];
    int flags = i < self->ins ? ARRAY_CONTIGUOUS : ARRAY_CONTIGUOUS | ARRAY_WRITEABLE;
    call->found[i].bytes = array_bytes(object, self->ports + i, flags);
    if (call->found[i].bytes < 0) return 0;
    call->found[i].data = ((Array *)object)->data;
  }
  return 1;
}

static PyObject *step(Caller *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
  CALL_OF(self, call);
  int64_t num = self->num;
  if (sort_arguments(self, &call, args, nargs, names)) return NULL;
  if (make_outputs(self, &call, -1)) return Py_XDECREF(call.result), NULL;
  int all_arrays = array_type && find_arrays(self, &call);
  if (!all_arrays && find_each(self, &call, 0, self->ins + self->outs)) return Py_DECREF(call.result), NULL;
  int fits = !check_found(self, &call, 1);
  if (fits && !self->busy) {
    const void *weights = self->weights->numbers->data;
    if (num)
      self->model->step_streams(weights, self->state, self->work, call.in, call.out, num);
    else
      self->model->step(weights, self->state, self->work, call.in, call.out);
  } else if (fits) {
    fits = 0;
    occupied(self);
  }
  if (!all_arrays) release(call.found, self->ins + self->outs);
  if (!fits) Py_CLEAR(call.result);
  return call.result;
}

/* How many events the first input holds whose events have a size; outputs tell it where there is no such input. */
static int count_events(Caller *self, const Call *call, Py_ssize_t until, int64_t *events) {
  for (Py_ssize_t i = 0; i < until; i++) {
    Py_ssize_t each = self->ports[i].bytes * (self->num ? self->num : 1);
    if (!each) continue;
    if (call->found[i].bytes % each)
      return PyErr_Format(self->wrong, "'%U' is %U of shape %R: got %zd bytes, no multiple of the %zd of one event", self->ports[i].name,
                          self->ports[i].dtype, self->ports[i].shape, call->found[i].bytes, each),
             -1;
    *events = call->found[i].bytes / each;
    return 0;
  }
  PyErr_SetString(self->wrong, "the number of events cannot be told from what was given; give out=");
  return -1;
}

static void run_many(Caller *self, const Call *call, const void *weights, int64_t events) {
  if (!self->num) {
    self->model->step_many(weights, self->state, self->work, call->in, call->out, events);
    return;
  }
  for (int64_t t = 0; t < events; t++) {
    self->model->step_streams(weights, self->state, self->work, call->in, call->out, self->num);
    for (Py_ssize_t i = 0; i < self->ins; i++) call->in[i] = (const char *)call->in[i] + self->ports[i].bytes * self->num;
    for (Py_ssize_t i = 0; i < self->outs; i++) call->out[i] = (char *)call->out[i] + self->ports[self->ins + i].bytes * self->num;
  }
}

static int find_many(Caller *self, Call *call, int64_t *events) {
  Py_ssize_t all = self->ins + self->outs;
  if (find_each(self, call, 0, self->ins)) return -1;
  int early = self->outs && call->outs[0]; /* outputs were given */
  if (early && find_each(self, call, self->ins, all)) return release(call->found, self->ins), -1;
  Py_ssize_t found = early ? all : self->ins;
  if (count_events(self, call, found, events) || make_outputs(self, call, *events)) return release(call->found, found), -1;
  if (!early && find_each(self, call, self->ins, all)) return release(call->found, self->ins), -1;
  if (!check_found(self, call, *events)) return 0;
  return release(call->found, all), -1;
}

static PyObject *step_many(Caller *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names) {
  CALL_OF(self, call);
  int64_t events = 0;
  if (sort_arguments(self, &call, args, nargs, names)) return NULL;
  if (find_many(self, &call, &events)) return Py_XDECREF(call.result), NULL;
  if (self->busy) {
    Py_CLEAR(call.result);
    occupied(self);
  } else if (events) {
    Numbers *numbers = (Numbers *)Py_NewRef(self->weights->numbers);
    self->busy = 1;
    Py_INCREF(self);
    Py_BEGIN_ALLOW_THREADS
    run_many(self, &call, numbers->data, events);
    Py_END_ALLOW_THREADS
    self->busy = 0;
    Py_DECREF(self);
    Py_DECREF(numbers);
  }
  release(call.found, self->ins + self->outs);
  return call.result;
}

/* -------------------------------------------------------------------------------------------------------------------- state */

static char *state_of(Caller *self, Py_ssize_t i) {
  if (i >= 0 && i < (self->num ? self->num : 1)) return self->state + i * self->model->state_bytes;
  PyErr_Format(self->wrong, "stream %zd of %zd", i, (Py_ssize_t)self->num);
  return NULL;
}

static void reset_all(Caller *self) {
  for (int64_t i = 0; i < (self->num ? self->num : 1); i++) self->model->reset(self->state + i * self->model->state_bytes);
}

static PyObject *reset(Caller *self, PyObject *unused) {
  (void)unused;
  if (self->busy) return occupied(self);
  reset_all(self);
  Py_RETURN_NONE;
}

static PyObject *snapshot_of(Caller *self, Py_ssize_t i) {
  if (self->busy) return occupied(self);
  const char *state = state_of(self, i);
  PyObject *plain = state ? PyBytes_FromStringAndSize(NULL, self->model->snapshot_bytes) : NULL;
  if (!plain) return NULL;
  memset(PyBytes_AS_STRING(plain), 0, self->model->snapshot_bytes); /* what lies between ports */
  self->model->snapshot(state, PyBytes_AS_STRING(plain));
  return plain;
}

static PyObject *restore_to(Caller *self, Py_ssize_t i, PyObject *source) {
  Py_buffer view;
  char *state = state_of(self, i);
  if (!state || PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)) return NULL;
  PyObject *done = NULL;
  if (self->busy)
    occupied(self);
  else if ((uint64_t)view.len != self->model->snapshot_bytes)
    PyErr_Format(self->wrong, "a snapshot of this model has %zd bytes, got %zd", (Py_ssize_t)self->model->snapshot_bytes, view.len);
  else {
    void *plain = aligned(view.len); /* the caller's bytes may begin anywhere */
    if (plain) {
      memcpy(plain, view.buf, view.len);
      self->model->restore(state, plain);
      free(plain);
      done = Py_NewRef(Py_None);
    }
  }
  PyBuffer_Release(&view);
  return done;
}

static PyObject *snapshot(Caller *self, PyObject *unused) { return (void)unused, snapshot_of(self, 0); }
static PyObject *restore(Caller *self, PyObject *source) { return restore_to(self, 0, source); }

static PyObject *stream_reset(Caller *self, PyObject *args) {
  PyObject *which = Py_None;
  if (!PyArg_ParseTuple(args, "|O", &which)) return NULL;
  if (which == Py_None) return reset(self, NULL);
  Py_ssize_t i = PyNumber_AsSsize_t(which, PyExc_IndexError);
  if (i == -1 && PyErr_Occurred()) return NULL;
  char *state = state_of(self, i);
  if (!state) return NULL;
  if (self->busy) return occupied(self);
  self->model->reset(state);
  Py_RETURN_NONE;
}

static PyObject *stream_snapshot(Caller *self, PyObject *args) {
  Py_ssize_t i;
  return PyArg_ParseTuple(args, "n", &i) ? snapshot_of(self, i) : NULL;
}

static PyObject *stream_restore(Caller *self, PyObject *args) {
  Py_ssize_t i;
  PyObject *source;
  return PyArg_ParseTuple(args, "nO", &i, &source) ? restore_to(self, i, source) : NULL;
}

/* --------------------------------------------------------------------------------------------------------------------- made */

static void Caller_dealloc(Caller *self) {
  for (Py_ssize_t i = 0; self->ports && i < self->ins + self->outs; i++) {
    Py_XDECREF(self->ports[i].name);
    Py_XDECREF(self->ports[i].dtype);
    Py_XDECREF(self->ports[i].shape);
  }
  free(self->ports);
  free(self->state);
  free(self->work);
  Py_XDECREF(self->weights);
  Py_XDECREF(self->wrong);
  Py_XDECREF(self->occupied);
  Py_XDECREF(self->arguments);
  Py_TYPE(self)->tp_free(self);
}

static int take_ports(Caller *self, PyObject *inputs, PyObject *outputs) {
  const flatout_native *model = self->model;
  if (PyTuple_GET_SIZE(inputs) != model->num_inputs || PyTuple_GET_SIZE(outputs) != model->num_outputs)
    return PyErr_SetString(PyExc_ValueError, "the library has other inputs or outputs than were described"), -1;
  if (model->num_inputs + model->num_outputs > MOST_PORTS)
    return PyErr_Format(PyExc_ValueError, "more than %d inputs and outputs", MOST_PORTS), -1;
  self->ins = model->num_inputs;
  self->outs = model->num_outputs;
  if (!(self->ports = calloc(self->ins + self->outs + 1, sizeof(Port)))) return PyErr_NoMemory(), -1;
  for (Py_ssize_t i = 0; i < self->ins; i++)
    if (port_init(self->ports + i, PyTuple_GET_ITEM(inputs, i), model->input_bytes[i])) return -1;
  for (Py_ssize_t i = 0; i < self->outs; i++)
    if (port_init(self->ports + self->ins + i, PyTuple_GET_ITEM(outputs, i), model->output_bytes[i])) return -1;
  return 0;
}

static int take_memory(Caller *self) {
  const flatout_native *model = self->model;
  int64_t num = self->num ? self->num : 1;
  uint64_t state;
  if (__builtin_mul_overflow(model->state_bytes, (uint64_t)num, &state)) return PyErr_NoMemory(), -1;
  self->state = aligned(state);
  self->work = self->state ? aligned(self->num ? model->streams_work_bytes : model->work_bytes) : NULL;
  if (!self->work) return -1;
  reset_all(self);
  return 0;
}

static Caller *caller_new(PyTypeObject *type, PyObject *arguments, int64_t num) {
  unsigned long long address;
  PyObject *weights, *inputs, *outputs, *wrong, *busy;
  if (!PyArg_ParseTuple(arguments, "KO!O!O!(OO)", &address, &Weights_type, &weights, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs,
                        &wrong, &busy))
    return NULL;
  const flatout_native *model = (const flatout_native *)(uintptr_t)address;
  Py_ssize_t size = ((Weights *)weights)->numbers->size;
  if (model->abi != 1) return PyErr_Format(PyExc_ValueError, "the library has interface %u; 1 is known", model->abi), NULL;
  if ((uint64_t)size != model->weights_bytes)
    return PyErr_Format(PyExc_ValueError, "%zd bytes of weights, the library needs %zd", size, (Py_ssize_t)model->weights_bytes), NULL;
  Caller *self = (Caller *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->model = model;
  self->num = num;
  self->weights = (Weights *)Py_NewRef(weights);
  self->wrong = Py_NewRef(wrong);
  self->occupied = Py_NewRef(busy);
  self->arguments = Py_NewRef(arguments);
  if (take_ports(self, inputs, outputs) || take_memory(self)) Py_CLEAR(self);
  return self;
}

static PyObject *Caller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  if (kwargs && PyDict_GET_SIZE(kwargs)) return PyErr_SetString(PyExc_TypeError, "arguments go by position"), NULL;
  return (PyObject *)caller_new(type, args, 0);
}

static PyObject *streams(Caller *self, PyObject *args) {
  Py_ssize_t num;
  if (!PyArg_ParseTuple(args, "n", &num)) return NULL;
  if (num < 1) return PyErr_Format(self->wrong, "%zd streams; give 1 or more", num), NULL;
  return (PyObject *)caller_new(&Streams_type, self->arguments, num);
}

static PyObject *copy(Caller *self, PyObject *unused) {
  (void)unused;
  Caller *made = caller_new(Py_TYPE(self), self->arguments, self->num);
  if (!made) return NULL;
  if (self->busy) return Py_DECREF(made), occupied(self);
  memcpy(made->state, self->state, self->model->state_bytes * (self->num ? self->num : 1));
  return (PyObject *)made;
}

static PyObject *get_num(Caller *self, void *unused) { return (void)unused, PyLong_FromLongLong(self->num ? self->num : 1); }

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS
static PyMethodDef Weights_methods[] = {
    {"set", (PyCFunction)Weights_set, METH_O, "Other numbers, as many: for all callers, from their next call on."},
    {"packed", (PyCFunction)Weights_packed, METH_NOARGS, "The numbers as bytes."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef Caller_methods[] = {
    {"step", FAST(step), "step(*inputs, out=None): one event."},
    {"step_many", FAST(step_many), "step_many(*inputs, out=None): many events, one after the other, without Python's lock."},
    {"reset", (PyCFunction)reset, METH_NOARGS, "The state as it was at first."},
    {"snapshot", (PyCFunction)snapshot, METH_NOARGS, "The state as bytes, in plain order."},
    {"restore", (PyCFunction)restore, METH_O, "The state of a snapshot."},
    {"copy", (PyCFunction)copy, METH_NOARGS, "Another stream with the same weights and this state."},
    {"streams", (PyCFunction)streams, METH_VARARGS, "streams(n): n streams with the same weights."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef Streams_methods[] = {
    {"step", FAST(step), "step(*inputs, out=None): one event of each stream; inputs are [n, ...]."},
    {"step_many", FAST(step_many), "step_many(*inputs, out=None): inputs are [T, n, ...]; without Python's lock."},
    {"reset", (PyCFunction)stream_reset, METH_VARARGS, "reset(i=None): one stream, or all."},
    {"snapshot", (PyCFunction)stream_snapshot, METH_VARARGS, "snapshot(i): a stream's state as bytes, in plain order."},
    {"restore", (PyCFunction)stream_restore, METH_VARARGS, "restore(i, snapshot): a stream's state."},
    {"copy", (PyCFunction)copy, METH_NOARGS, "As many streams again, with the same weights and these states."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef Streams_fields[] = {
    {"num_streams", (getter)get_num, NULL, "How many.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Numbers_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flatout_caller.Numbers",
    .tp_basicsize = sizeof(Numbers),
    .tp_dealloc = (destructor)Numbers_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
};
static PyTypeObject Weights_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flatout_caller.Weights",
    .tp_basicsize = sizeof(Weights),
    .tp_dealloc = (destructor)Weights_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = Weights_methods,
    .tp_new = Weights_new,
};
static PyTypeObject Caller_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flatout_caller.Caller",
    .tp_basicsize = sizeof(Caller),
    .tp_dealloc = (destructor)Caller_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = Caller_methods,
    .tp_new = Caller_new,
};
static PyTypeObject Streams_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flatout_caller.Streams",
    .tp_basicsize = sizeof(Caller),
    .tp_dealloc = (destructor)Caller_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_methods = Streams_methods,
    .tp_getset = Streams_fields,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "flatout_caller", .m_size = -1};

PyMODINIT_FUNC PyInit_flatout_caller(void) {
  static const struct {
    PyObject **at;
    const char *text;
  } names[] = {{&s_out, "out"},     {&s_is_cpu, "is_cpu"}, {&s_is_contiguous, "is_contiguous"}, {&s_is_neg, "is_neg"},
               {&s_dtype, "dtype"}, {&s_nbytes, "nbytes"}, {&s_data_ptr, "data_ptr"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (!(*names[i].at = PyUnicode_InternFromString(names[i].text))) return NULL;
  if (PyType_Ready(&Numbers_type) || PyType_Ready(&Streams_type)) return NULL;
  PyObject *made = PyModule_Create(&module);
  if (made && (PyModule_AddType(made, &Weights_type) || PyModule_AddType(made, &Caller_type))) Py_CLEAR(made);
  return made;
}
