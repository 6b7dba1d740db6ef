/* The operator that ONNX Runtime calls. It reads the attributes and inputs, and runs attention.c for one new token per
 * sequence, or prefill.c for several, on the session's threads. */
#include "prefill.c"

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
  if (found != count) return ORT_CREATE_STATUS(api)(ORT_FAIL, "kvgate: an attribute has the wrong number of values");
  for (size_t i = 0; i < count; i++) out[i] = (int)values[i];
  return NULL;
}

#define REFUSE(api, text) return ORT_CREATE_STATUS(api)(ORT_FAIL, "kvgate: " text)

/* Read the address of an input; NULL for index -1. Check its element type and dimensions, where -1
 * accepts any size and is replaced by this size. The check is needed because bundles are untrusted. */
static OrtStatus *tensor(const OrtApi *api, const OrtKernelContext *context, int index, int type, size_t rank, int64_t *dims,
                         void *address) {
  const OrtValue *value;
  OrtTensorTypeAndShapeInfo *shape;
  void *data = NULL;
  if (index >= 0) {
    int64_t found[4];
    size_t found_rank = 0;
    int found_type = ORT_UNDEFINED, fits;
    TRY(ORT_INPUT(api)(context, (size_t)index, &value));
    if (!value) REFUSE(api, "an attention input is missing");
    TRY(ORT_SHAPE(api)(value, &shape));
    OrtStatus *status = ORT_ELEMENT_TYPE(api)(shape, &found_type);
    if (!status) status = ORT_DIMENSIONS_COUNT(api)(shape, &found_rank);
    fits = found_type == type && found_rank == rank;
    if (!status && fits) status = ORT_DIMENSIONS(api)(shape, found, rank);
    ORT_RELEASE_SHAPE(api)(shape);
    if (status) return status;
    for (size_t i = 0; i < rank && fits; i++) {
      if (dims[i] < 0) dims[i] = found[i];
      fits = dims[i] == found[i];
    }
    if (!fits) REFUSE(api, "an attention input does not have the type or shape of the bundle's policy and model");
    TRY(ORT_TENSOR_DATA(api)(value, &data));
  }
  memcpy(address, &data, sizeof data);
  return NULL;
}

/* Read the inputs of one side into `store`, with the number of its pages or exact buffers. */
static OrtStatus *read_store(const Layer *layer, const OrtKernelContext *context, int number, Store *store) {
  static const int types[KINDS] = {ORT_FLOAT16, ORT_BFLOAT16, ORT_E4M3, ORT_E5M2, ORT_INT8,
                                   ORT_INT8,    ORT_INT8,     ORT_INT8, ORT_INT8};
  const Side *side = &layer->sides[number];
  const OrtApi *api = layer->api;
  store->side = side;
  if (side->input < 0) return NULL;
  int next = side->input, type = types[side->kind], exact = number == EXACT_KEY || number == EXACT_VALUE;
  int64_t element = side->kind == FP16 || side->kind == BF16 ? 2 : 1, tokens = exact ? layer->sink + layer->recent : PAGE;
  int64_t codes[] = {-1, layer->kv_heads, tokens, row_bytes(side->kind) / element};
  TRY(tensor(api, context, next++, type, 4, codes, &store->codes));
  store->blocks = codes[0];
  int64_t stored[] = {codes[0], layer->kv_heads, PAGE, side->groups};
  int scale_type = side->kind == NVFP4 ? ORT_E4M3 : ORT_FLOAT16;
  if (side->groups) TRY(tensor(api, context, next++, scale_type, 4, stored, &store->scales));
  if (side->groups && side->asymmetric) TRY(tensor(api, context, next++, ORT_FLOAT16, 4, stored, &store->zeros));
  int64_t fixed[] = {1, side->scale_heads, 1, side->scale_channels};
  if (side->is_static) TRY(tensor(api, context, next++, ORT_FLOAT, 4, fixed, &store->static_scale));
  if (side->is_static && side->asymmetric) TRY(tensor(api, context, next++, ORT_FLOAT, 4, fixed, &store->static_zero));
  return NULL;
}

/* Return whether the units of a row read only pages within the tables and pools, and an existing exact buffer. */
static int in_bounds(const Call *call, int row) {
  if (call->lengths[row] < 0 || (call->layer->windowed && call->window_starts[row] < 0)) return 0;
  for (int number = 0; number < REGIONS; number++) {
    Region region = find_region(call, row, number, 0);
    if (region.last <= region.first) continue;
    if (number == EXACT) {
      int32_t slot = call->exact_slots[row];
      if (slot < 0 || slot >= region.keys->blocks || slot >= region.values->blocks) return 0;
      continue;
    }
    int64_t width = number == BEFORE ? call->pages : call->window_pages, pages = (region.last + PAGE - 1) / PAGE;
    if (region.first < 0 || pages > width) return 0;
    for (int64_t i = region.first / PAGE; i < pages; i++) {
      int32_t key = region.key_table[i], value = region.value_table[i];
      if (key < 0 || key >= region.keys->blocks || value < 0 || value >= region.values->blocks) return 0;
    }
  }
  return 1;
}

/* Return `count` float32 values: `from` itself, or its float16 values converted into `to`. */
static const float *floats(const Layer *layer, const void *from, size_t count, float *to) {
  if (!layer->half) return from;
  for (size_t i = 0; i < count; i += LANES) store(to + i, from_half((const uint16_t *)from + i));
  return to;
}

/* Decode one new token for each of `rows` sequences. */
static OrtStatus *decode(Call *call, const OrtKernelContext *context, size_t rows, const float *keys, const float *values,
                         float *out) {
  const Layer *layer = call->layer;
  size_t heads = rows * layer->kv_heads, count = list_units(call, (int)rows, UNIT_PAGES, NULL);
  size_t partials = count * GROUP * sizeof(Partial);
  char *scratch = malloc(partials + count * sizeof(Unit) + 1);
  if (!scratch) REFUSE(layer->api, "out of memory for the partial results of attention");
  Unit *units = (Unit *)(scratch + partials);
  list_units(call, (int)rows, UNIT_PAGES, units);
  call->units = units, call->partials = (Partial *)scratch;
  OrtStatus *status = count ? ORT_PARALLEL_FOR(layer->api)(context, attend_unit, count, 0, call) : NULL;
  for (size_t head = 0, unit = 0; head < heads && !status; head++) {
    size_t first = unit;
    while (unit < count && (size_t)units[unit].row * layer->kv_heads + units[unit].head == head) unit++;
    for (int q = 0; q < GROUP; q++) {
      size_t at = (head * GROUP + q) * HEAD_DIM;
      const float *sink = call->sinks ? call->sinks + head % layer->kv_heads * GROUP + q : NULL;
      join(call->partials + first * GROUP + q, (int)(unit - first), layer, sink, call->query + at, keys + head * HEAD_DIM,
           values + head * HEAD_DIM, out + at);
    }
  }
  free(scratch);
  return status;
}

/* Prefill `tokens` new tokens of each of `rows` sequences. */
static OrtStatus *prefill(Call *call, const OrtKernelContext *context, size_t rows, size_t tokens, const float *keys,
                          const float *values, float *out) {
  const Layer *layer = call->layer;
  size_t heads = rows * layer->kv_heads, cached = list_units(call, (int)rows, 1, NULL), chunk = (tokens + PAGE - 1) / PAGE;
  size_t chunks = (tokens + TOKENS - 1) / TOKENS, count = cached + heads * chunk;
  char *scratch = malloc(count * sizeof(Block) + cached * sizeof(Unit));
  if (!scratch) REFUSE(layer->api, "out of memory for the keys and values of a prompt");
  Unit *units = (Unit *)(scratch + count * sizeof(Block));
  list_units(call, (int)rows, 1, units);
  call->units = units;
  Prefill all = {*call, keys, values, out, (Block *)scratch, (int)tokens, (int)heads, (int)cached, (int)chunk, (int)chunks};
  OrtStatus *status = ORT_PARALLEL_FOR(layer->api)(context, widen_block, count, 0, &all);
  /* One batch per unit, so that each thread takes the next unit when it is free. */
  if (!status) status = ORT_PARALLEL_FOR(layer->api)(context, attend_tokens, heads * chunks, heads * chunks, &all);
  free(scratch);
  return status;
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
  const Layer *layer = kernel;
  const OrtApi *api = layer->api;
  Call call = {.layer = layer};
  const void *query = NULL, *key = NULL, *value = NULL, *sinks = NULL;
  int type = layer->half ? ORT_FLOAT16 : ORT_FLOAT;
  int64_t shape[] = {-1, (int64_t)layer->kv_heads * GROUP, -1, HEAD_DIM};
  TRY(tensor(api, context, 0, type, 4, shape, &query));
  int64_t new_shape[] = {shape[0], layer->kv_heads, shape[2], HEAD_DIM};
  TRY(tensor(api, context, 1, type, 4, new_shape, &key));
  TRY(tensor(api, context, 2, type, 4, new_shape, &value));
  int64_t table[] = {shape[0], -1}, window_table[] = {shape[0], -1};
  TRY(tensor(api, context, layer->page_table, ORT_INT32, 2, table, &call.page_table));
  TRY(tensor(api, context, layer->lengths, ORT_INT32, 1, shape, &call.lengths));
  TRY(tensor(api, context, layer->window_base_table, ORT_INT32, 2, window_table, &call.window_base_table));
  TRY(tensor(api, context, layer->window_table, ORT_INT32, 2, window_table, &call.window_table));
  TRY(tensor(api, context, layer->window_starts, ORT_INT32, 1, shape, &call.window_starts));
  TRY(tensor(api, context, layer->exact_slots, ORT_INT32, 1, shape, &call.exact_slots));
  int64_t query_heads[] = {shape[1]};
  TRY(tensor(api, context, layer->sinks, type, 1, query_heads, &sinks));
  call.pages = table[1], call.window_pages = window_table[1];
  for (int i = 0; i < SIDES; i++) TRY(read_store(layer, context, i, &call.stores[i]));
  for (int row = 0; row < shape[0]; row++)
    if (!in_bounds(&call, row)) REFUSE(api, "a block table names a page outside of its pool");

  const int64_t out_shape[] = {shape[0], shape[2], shape[1], HEAD_DIM};
  OrtValue *out_value;
  void *out;
  TRY(ORT_OUTPUT(api)(context, 0, out_shape, 4, &out_value));
  TRY(ORT_TENSOR_DATA(api)(out_value, &out));

  size_t rows = (size_t)shape[0], tokens = (size_t)shape[2], states = rows * tokens * layer->kv_heads * HEAD_DIM;
  if (!states) return NULL;
  size_t queries = states * GROUP, sink_floats = sinks ? ((size_t)shape[1] + LANES - 1) / LANES * LANES : 0;
  float *space = layer->half ? malloc((2 * queries + 2 * states + sink_floats) * sizeof(float)) : NULL;
  if (layer->half && !space) REFUSE(api, "out of memory for float32 copies of the inputs");
  call.query = floats(layer, query, queries, space);
  const float *keys = floats(layer, key, states, space + queries);
  const float *values = floats(layer, value, states, space + queries + states);
  float *results = layer->half ? space + queries + 2 * states : out;
  call.sinks = sinks;
  if (layer->half && sinks) {
    float *to = space + 2 * queries + 2 * states;
    for (size_t i = 0; i < sink_floats; i += LANES) {
      uint16_t halves[LANES] = {0}; /* the last vector may not be full */
      size_t count = (size_t)shape[1] - i < LANES ? (size_t)shape[1] - i : LANES;
      memcpy(halves, (const uint16_t *)sinks + i, count * sizeof *halves);
      store(to + i, from_half(halves));
    }
    call.sinks = to;
  }
  OrtStatus *status = tokens == 1 ? decode(&call, context, rows, keys, values, results)
                                  : prefill(&call, context, rows, tokens, keys, values, results);
  for (size_t i = 0; i < queries && layer->half && !status; i += LANES) to_half((uint16_t *)out + i, load(results + i));
  free(space);
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

/* `create` reads the numbers of an attribute into consecutive fields. */
_Static_assert(offsetof(Layer, gap_length) == offsetof(Layer, head_dim) + 7 * sizeof(int), "`sizes`: 8 consecutive fields");
_Static_assert(offsetof(Layer, sinks) == offsetof(Layer, page_table) + 6 * sizeof(int), "`tables`: 7 consecutive fields");
_Static_assert(sizeof(Side) == 8 * sizeof(int), "a side has 8 fields");

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
  Layer *layer = calloc(1, sizeof *layer);
  if (!layer) return ORT_CREATE_STATUS(api)(ORT_FAIL, "kvgate: out of memory for an operator");
  layer->api = api, layer->half = op == &HALF_OPERATOR;
  OrtStatus *status = ORT_FLOAT_ATTRIBUTE(api)(info, "scaling", &layer->scaling);
  if (!status) status = ORT_FLOAT_ATTRIBUTE(api)(info, "softcap", &layer->softcap);
  if (!status) status = integers(api, info, "sizes", 8, &layer->head_dim);
  if (!status) status = integers(api, info, "tables", 7, &layer->page_table);
  for (int i = 0; i < SIDES && !status; i++) status = integers(api, info, SIDE_NAMES[i], 8, (int *)&layer->sides[i]);
  if (!status && (layer->head_dim != HEAD_DIM || layer->group != GROUP))
    status = ORT_CREATE_STATUS(api)(ORT_FAIL, "kvgate: the kernel was compiled for another head size or group");
  if (status) {
    free(layer);
    return status;
  }
  layer->windowed = layer->window_table >= 0;
  *kernel = layer;
  return NULL;
}

/* Called by ONNX Runtime when the library is registered with a session's options. The domain must outlive the session, which
 * does not own it, so it is never freed: a few hundred bytes per session. */
__attribute__((visibility("default"))) OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  const OrtApi *api = base->get_api(ORT_API_VERSION);
  if (!api) return ORT_CREATE_STATUS(base->get_api(1))(ORT_FAIL, "kvgate: ONNX Runtime 1.17 or later is needed");
  OrtCustomOpDomain *domain;
  TRY(ORT_CREATE_DOMAIN(api)("kvgate.native", &domain));
  TRY(ORT_ADD_TO_DOMAIN(api)(domain, &FLOAT_OPERATOR));
  TRY(ORT_ADD_TO_DOMAIN(api)(domain, &HALF_OPERATOR));
  return ORT_ADD_DOMAIN(api)(options, domain);
}
