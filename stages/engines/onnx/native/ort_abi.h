/* The part of ONNX Runtime's C interface that a custom operator needs, declared from its documentation, because wheels have no
 * headers.
 *
 * OrtApi is a table of function pointers. Releases only append to it, so a slot's number never changes its meaning
 * (https://onnxruntime.ai/docs/api/c/struct_ort_api.html). Version 17 is the first with KernelContext_ParallelFor. */
#ifndef KVGATE_ORT_ABI_H
#define KVGATE_ORT_ABI_H

#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 17

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtCustomOp OrtCustomOp;
typedef void *OrtApi; /* an element of the table */

typedef struct {
  const OrtApi *(*get_api)(uint32_t version);
  const char *(*get_version_string)(void);
} OrtApiBase;

enum { ORT_FAIL = 1 };
enum { /* element types, numbered as in ONNX */
  ORT_UNDEFINED = 0, ORT_FLOAT = 1, ORT_INT8 = 3, ORT_INT32 = 6, ORT_FLOAT16 = 10, ORT_BFLOAT16 = 16, ORT_E4M3 = 17, ORT_E5M2 = 19
};
enum { ORT_REQUIRED = 0, ORT_VARIADIC = 2 };

#define ORT_SLOT(api, slot, type) ((type)(api)[slot])
#define ORT_CREATE_STATUS(api) ORT_SLOT(api, 0, OrtStatus *(*)(int, const char *))
#define ORT_CREATE_DOMAIN(api) ORT_SLOT(api, 26, OrtStatus *(*)(const char *, OrtCustomOpDomain **))
#define ORT_ADD_TO_DOMAIN(api) ORT_SLOT(api, 27, OrtStatus *(*)(OrtCustomOpDomain *, const OrtCustomOp *))
#define ORT_ADD_DOMAIN(api) ORT_SLOT(api, 28, OrtStatus *(*)(OrtSessionOptions *, OrtCustomOpDomain *))
#define ORT_TENSOR_DATA(api) ORT_SLOT(api, 51, OrtStatus *(*)(const OrtValue *, void **))
#define ORT_ELEMENT_TYPE(api) ORT_SLOT(api, 60, OrtStatus *(*)(const OrtTensorTypeAndShapeInfo *, int *))
#define ORT_DIMENSIONS_COUNT(api) ORT_SLOT(api, 61, OrtStatus *(*)(const OrtTensorTypeAndShapeInfo *, size_t *))
#define ORT_DIMENSIONS(api) ORT_SLOT(api, 62, OrtStatus *(*)(const OrtTensorTypeAndShapeInfo *, int64_t *, size_t))
#define ORT_SHAPE(api) ORT_SLOT(api, 65, OrtStatus *(*)(const OrtValue *, OrtTensorTypeAndShapeInfo **))
#define ORT_FLOAT_ATTRIBUTE(api) ORT_SLOT(api, 85, OrtStatus *(*)(const OrtKernelInfo *, const char *, float *))
#define ORT_INPUT(api) ORT_SLOT(api, 90, OrtStatus *(*)(const OrtKernelContext *, size_t, const OrtValue **))
#define ORT_OUTPUT(api) ORT_SLOT(api, 91, OrtStatus *(*)(OrtKernelContext *, size_t, const int64_t *, size_t, OrtValue **))
#define ORT_RELEASE_SHAPE(api) ORT_SLOT(api, 99, void (*)(OrtTensorTypeAndShapeInfo *))
#define ORT_INTS_ATTRIBUTE(api) ORT_SLOT(api, 163, OrtStatus *(*)(const OrtKernelInfo *, const char *, int64_t *, size_t *))
#define ORT_PARALLEL_FOR(api) \
  ORT_SLOT(api, 274, OrtStatus *(*)(const OrtKernelContext *, void (*)(void *, size_t), size_t, size_t, void *))

/* The table that describes an operator. ONNX Runtime does not read the later fields from a table of version 17. */
struct OrtCustomOp {
  uint32_t version;
  void *(*create_kernel)(const struct OrtCustomOp *, const OrtApi *, const OrtKernelInfo *);
  const char *(*get_name)(const struct OrtCustomOp *);
  const char *(*get_execution_provider)(const struct OrtCustomOp *);
  int (*get_input_type)(const struct OrtCustomOp *, size_t);
  size_t (*get_input_count)(const struct OrtCustomOp *);
  int (*get_output_type)(const struct OrtCustomOp *, size_t);
  size_t (*get_output_count)(const struct OrtCustomOp *);
  void (*compute)(void *, OrtKernelContext *);
  void (*destroy)(void *);
  int (*get_input_characteristic)(const struct OrtCustomOp *, size_t);
  int (*get_output_characteristic)(const struct OrtCustomOp *, size_t);
  int (*get_input_memory_type)(const struct OrtCustomOp *, size_t);
  int (*get_variadic_input_min_arity)(const struct OrtCustomOp *);
  int (*get_variadic_input_homogeneity)(const struct OrtCustomOp *);
  int (*get_variadic_output_min_arity)(const struct OrtCustomOp *);
  int (*get_variadic_output_homogeneity)(const struct OrtCustomOp *);
  OrtStatus *(*create_kernel_v2)(const struct OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **);
  OrtStatus *(*compute_v2)(void *, OrtKernelContext *);
  OrtStatus *(*infer_output_shape)(const struct OrtCustomOp *, void *);
  int (*get_start_version)(const struct OrtCustomOp *);
  int (*get_end_version)(const struct OrtCustomOp *);
};

#endif
