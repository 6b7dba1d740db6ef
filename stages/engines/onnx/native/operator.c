/* The operator that ONNX Runtime calls: reads its attributes and inputs, and runs attention.c on the session's own threads. */
#include "attention.c"

#define TRY(call) \
  do { \
    OrtStatus *status = (call); \
    if (status) return status; \
  } while (0)

static const char *const SIDE_NAMES[SIDES] = {"key", "value", "window_key", "window_value", "key_exact", "value_exact"};

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel);

static OrtStatus *integers(const OrtApi *api, const OrtKernelInfo *info, const char *name, size_t count, int *out) {
  int64_t values[16] = {0};
  size_t found = count;
  TRY(ORT_INTS_ATTRIBUTE(api)(info, name, values, &found));
  if (found != count) return ORT_CREATE_STATUS(api)(ORT_FAIL, "kvgate: an attribute has another number of values");
  for (size_t i = 0; i < count; i++) out[i] = (int)values[i];
  return NULL;
}

static OrtStatus *tensor(const OrtApi *api, const OrtKernelContext *context, int index, const void **data) {
  const OrtValue *value;
  *data = NULL;
  if (index < 0) return NULL;
  TRY(ORT_INPUT(api)(context, (size_t)index, &value));
  return ORT_TENSOR_DATA(api)(value, (void **)data);
}

/* The dimensions of an input, at most four. */
static OrtStatus *dimensions(const OrtApi *api, const OrtKernelContext *context, int index, int64_t *out) {
  const OrtValue *value;
  OrtTensorTypeAndShapeInfo *shape;
  size_t rank;
  if (index < 0) return NULL;
  TRY(ORT_INPUT(api)(context, (size_t)index, &value));
  TRY(ORT_SHAPE(api)(value, &shape));
  OrtStatus *status = ORT_DIMENSIONS_COUNT(api)(shape, &rank);
  if (!status) status = ORT_DIMENSIONS(api)(shape, out, rank < 4 ? rank : 4);
  ORT_RELEASE_SHAPE(api)(shape);
  return status;
}

static OrtStatus *read_store(const Layer *layer, const OrtKernelContext *context, int number, Store *store) {
  const Side *side = &layer->sides[number];
  store->side = side;
  if (side->input < 0) return NULL;
  int next = side->input;
  TRY(tensor(layer->api, context, next++, (const void **)&store->codes));
  if (side->groups) TRY(tensor(layer->api, context, next++, (const void **)&store->scales));
  if (side->groups && side->asymmetric) TRY(tensor(layer->api, context, next++, (const void **)&store->zeros));
  if (side->is_static) TRY(tensor(layer->api, context, next++, (const void **)&store->static_scale));
  if (side->is_static && side->asymmetric) TRY(tensor(layer->api, context, next++, (const void **)&store->static_zero));
  return NULL;
}

/* `count` numbers as floats: where they lie, or widened into `to`. */
static const float *floats(const Layer *layer, const void *from, size_t count, float *to) {
  if (!layer->half) return from;
  for (size_t i = 0; i < count; i += LANES) store(to + i, from_half((const uint16_t *)from + i));
  return to;
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
  const Layer *layer = kernel;
  const OrtApi *api = layer->api;
  Call call = {.layer = layer};
  const void *inputs[3];
  int64_t shape[4], table[4];
  for (int i = 0; i < 3; i++) TRY(tensor(api, context, i, &inputs[i]));
  TRY(dimensions(api, context, 0, shape));
  TRY(dimensions(api, context, layer->page_table, table));
  call.pages = table[1];
  TRY(tensor(api, context, layer->page_table, (const void **)&call.page_table));
  TRY(tensor(api, context, layer->lengths, (const void **)&call.lengths));
  if (layer->windowed) {
    TRY(dimensions(api, context, layer->window_table, table));
    call.window_pages = table[1];
    TRY(tensor(api, context, layer->window_base_table, (const void **)&call.window_base_table));
    TRY(tensor(api, context, layer->window_table, (const void **)&call.window_table));
    TRY(tensor(api, context, layer->window_starts, (const void **)&call.window_starts));
  }
  TRY(tensor(api, context, layer->exact_slots, (const void **)&call.exact_slots));
  for (int i = 0; i < SIDES; i++) TRY(read_store(layer, context, i, &call.stores[i]));

  const int64_t out_shape[4] = {shape[0], 1, shape[1], HEAD_DIM};
  OrtValue *out_value;
  void *out;
  TRY(ORT_OUTPUT(api)(context, 0, out_shape, 4, &out_value));
  TRY(ORT_TENSOR_DATA(api)(out_value, &out));

  size_t rows = (size_t)shape[0], heads = rows * layer->kv_heads, queries = heads * GROUP;
  size_t count = list_units(&call, (int)rows, NULL);
  size_t widened = layer->half ? (queries + 2 * heads + queries) * HEAD_DIM * sizeof(float) : 0;
  size_t partials = count * GROUP * sizeof(Partial);
  char *scratch = malloc(partials + widened + count * sizeof(Unit) + 1);
  if (!scratch) return ORT_CREATE_STATUS(api)(ORT_FAIL, "kvgate: no memory for the partial results of attention");
  float *space = (float *)(scratch + partials);
  Unit *units = (Unit *)(scratch + partials + widened);
  list_units(&call, (int)rows, units);
  call.units = units, call.partials = (Partial *)scratch;
  call.query = floats(layer, inputs[0], queries * HEAD_DIM, space);
  const float *key = floats(layer, inputs[1], heads * HEAD_DIM, space + queries * HEAD_DIM);
  const float *value = floats(layer, inputs[2], heads * HEAD_DIM, space + (queries + heads) * HEAD_DIM);
  float *results = layer->half ? space + (queries + 2 * heads) * HEAD_DIM : out;

  OrtStatus *status = count ? ORT_PARALLEL_FOR(api)(context, attend_unit, count, 0, &call) : NULL;
  if (!status) {
    size_t unit = 0;
    for (size_t head = 0; head < heads; head++) {
      size_t first = unit;
      while (unit < count && (size_t)units[unit].row * layer->kv_heads + units[unit].head == head) unit++;
      for (int q = 0; q < GROUP; q++) {
        size_t at = (head * GROUP + q) * HEAD_DIM;
        join(call.partials + first * GROUP + q, (int)(unit - first), call.query + at, layer->scaling, key + head * HEAD_DIM,
             value + head * HEAD_DIM, results + at);
      }
    }
    if (layer->half)
      for (size_t i = 0; i < queries * HEAD_DIM; i += LANES) to_half((uint16_t *)out + i, load(results + i));
  }
  free(scratch);
  return status;
}

static void destroy(void *kernel) { free(kernel); }

static const char *name_float(const OrtCustomOp *op) { return "PagedAttention"; }
static const char *name_half(const OrtCustomOp *op) { return "PagedAttentionHalf"; }
static const char *provider(const OrtCustomOp *op) { return NULL; }
static int any_type(const OrtCustomOp *op, size_t index) { return ORT_UNDEFINED; }
static int float_type(const OrtCustomOp *op, size_t index) { return ORT_FLOAT; }
static int half_type(const OrtCustomOp *op, size_t index) { return ORT_FLOAT16; }
static size_t one(const OrtCustomOp *op) { return 1; }
static int variadic(const OrtCustomOp *op, size_t index) { return ORT_VARIADIC; }
static int required(const OrtCustomOp *op, size_t index) { return ORT_REQUIRED; }
static int on_cpu(const OrtCustomOp *op, size_t index) { return 0; }
static int at_least_one(const OrtCustomOp *op) { return 1; }
static int mixed(const OrtCustomOp *op) { return 0; }
static int first_version(const OrtCustomOp *op) { return 1; }
static int last_version(const OrtCustomOp *op) { return INT32_MAX; }

#define OPERATOR(name, type) \
  {.version = ORT_API_VERSION, .get_name = name, .get_execution_provider = provider, .get_input_type = any_type, \
   .get_input_count = one, .get_output_type = type, .get_output_count = one, .destroy = destroy, \
   .get_input_characteristic = variadic, .get_output_characteristic = required, .get_input_memory_type = on_cpu, \
   .get_variadic_input_min_arity = at_least_one, .get_variadic_input_homogeneity = mixed, \
   .get_variadic_output_min_arity = at_least_one, .get_variadic_output_homogeneity = mixed, .create_kernel_v2 = create, \
   .compute_v2 = compute, .get_start_version = first_version, .get_end_version = last_version}
static const OrtCustomOp FLOAT_OPERATOR = OPERATOR(name_float, float_type);
static const OrtCustomOp HALF_OPERATOR = OPERATOR(name_half, half_type);

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
  Layer *layer = calloc(1, sizeof *layer);
  if (!layer) return ORT_CREATE_STATUS(api)(ORT_FAIL, "kvgate: no memory for an operator");
  layer->api = api, layer->half = op == &HALF_OPERATOR;
  int sizes[5], tables[6];
  OrtStatus *status = ORT_FLOAT_ATTRIBUTE(api)(info, "scaling", &layer->scaling);
  if (!status) status = integers(api, info, "sizes", 5, sizes);
  if (!status) status = integers(api, info, "tables", 6, tables);
  for (int i = 0; i < SIDES && !status; i++) status = integers(api, info, SIDE_NAMES[i], 8, (int *)&layer->sides[i]);
  if (!status && (sizes[0] != HEAD_DIM || sizes[1] != GROUP))
    status = ORT_CREATE_STATUS(api)(ORT_FAIL, "kvgate: the kernel was compiled for other heads");
  if (status) {
    free(layer);
    return status;
  }
  layer->kv_heads = sizes[2], layer->sink = sizes[3], layer->recent = sizes[4];
  layer->page_table = tables[0], layer->lengths = tables[1], layer->window_base_table = tables[2];
  layer->window_table = tables[3], layer->window_starts = tables[4], layer->exact_slots = tables[5];
  layer->windowed = layer->window_table >= 0;
  *kernel = layer;
  return NULL;
}

/* ONNX Runtime calls this when the library is registered with a session's options. The domain must outlive the session, which
 * does not own it, so that it stays for the life of the process: some hundred bytes a session. */
__attribute__((visibility("default"))) OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  const OrtApi *api = base->get_api(ORT_API_VERSION);
  if (!api) return ORT_CREATE_STATUS(base->get_api(1))(ORT_FAIL, "kvgate: ONNX Runtime 1.17 or later is needed");
  OrtCustomOpDomain *domain;
  TRY(ORT_CREATE_DOMAIN(api)("kvgate.native", &domain));
  TRY(ORT_ADD_TO_DOMAIN(api)(domain, &FLOAT_OPERATOR));
  TRY(ORT_ADD_TO_DOMAIN(api)(domain, &HALF_OPERATOR));
  return ORT_ADD_DOMAIN(api)(options, domain);
}
