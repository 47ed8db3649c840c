/* A stand-in for CUDA on a machine without a GPU: PyTorch's own host code runs, and its kernels do nothing.
 *
 * Preloaded, it answers in place of the driver, the CUDA runtime, cuBLAS, cuDNN and NCCL, as far as a training asks.
 * Device memory is host memory, zero where nothing was copied to it; a copy copies; a launch is counted and forgotten.
 * One call of cuBLAS, cuDNN or NCCL that computes counts as one launch; copies and fills of memory are none.
 * What is not here goes to the real libraries, which find no driver and say so.
 *
 * cc -shared -fPIC -I .../nvidia/cu13/include -o libcuda.so.1 -Wl,-soname,libcuda.so.1 no_gpu.c
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES = 2, MULTIPROCESSORS = 108 };
static const size_t MEMORY = (size_t)40 << 30;
static __thread int current;
static long launched, waited;
static int fill; /* what new device memory holds, in each byte */

long no_gpu_launched(void) { return launched; }
long no_gpu_waited(void) { return waited; } /* how often the host waited for the device */
void no_gpu_fill(int byte) { fill = byte; }

/* Also from the threads of the backward pass. */
#define COUNT(number) (__atomic_add_fetch(&(number), 1, __ATOMIC_RELAXED), 0)
/* While a graph is captured, what is launched is not, and nothing may wait for the device. */
static cudaStream_t captured;
static int capturing;
#define LAUNCHED (capturing ? 0 : COUNT(launched))
#define WAITED (capturing ? cudaErrorStreamCaptureUnsupported : COUNT(waited))
#define OUT(pointer, value) (*(pointer) = (value), 0)
#define HANDLE(pointer) OUT((void **)(pointer), malloc(64))

/* -- the runtime: devices -- */
cudaError_t cudaGetDeviceCount(int *count) { return OUT(count, DEVICES); }
cudaError_t cudaGetDevice(int *device) { return OUT(device, current); }
cudaError_t cudaSetDevice(int device) { current = device; return device < DEVICES ? 0 : cudaErrorInvalidDevice; }
cudaError_t cudaDriverGetVersion(int *version) { return OUT(version, CUDART_VERSION); }
cudaError_t cudaDeviceSynchronize(void) { return WAITED; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return OUT(can, device != peer); }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; return OUT(greatest, -5); }
cudaError_t cudaGetLastError(void) { return 0; }
cudaError_t cudaPeekAtLastError(void) { return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) { strncpy(id, "0000:01:00.0", size); return 0; }

/* An A100's. */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "no GPU");
    p->major = 8;
    p->totalGlobalMem = MEMORY;
    p->multiProcessorCount = MULTIPROCESSORS;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 163 << 10;
    p->sharedMemPerMultiprocessor = 164 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 40 << 20;
    p->textureAlignment = 512;
    return 0;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return OUT(value, 8);
    case cudaDevAttrMultiProcessorCount: return OUT(value, MULTIPROCESSORS);
    case cudaDevAttrMaxThreadsPerBlock: return OUT(value, 1024);
    case cudaDevAttrMaxThreadsPerMultiProcessor: return OUT(value, 2048);
    case cudaDevAttrMaxSharedMemoryPerBlock: return OUT(value, 48 << 10);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return OUT(value, 163 << 10);
    case cudaDevAttrMaxGridDimX: return OUT(value, 0x7fffffff);
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return OUT(value, 65535);
    case cudaDevAttrWarpSize: return OUT(value, 32);
    default: return OUT(value, 0);
    }
}

/* -- the runtime: memory -- */
static cudaError_t take(void **pointer, size_t size) {
    if (posix_memalign(pointer, 512, size ? size : 1)) return cudaErrorMemoryAllocation;
    memset(*pointer, fill, size);
    return 0;
}
cudaError_t cudaMalloc(void **pointer, size_t size) { return take(pointer, size); }
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return take(pointer, size); }
cudaError_t cudaFree(void *pointer) { free(pointer); return 0; }
cudaError_t cudaFreeHost(void *pointer) { free(pointer); return 0; }
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) { *total = MEMORY; return OUT(unused, MEMORY); }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    memmove(to, from, n);
    return WAITED;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
    memmove(to, from, n);
    return 0;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t n, cudaStream_t stream) {
    memmove(to, from, n);
    return 0;
}
cudaError_t cudaMemset(void *to, int byte, size_t n) { memset(to, byte, n); return 0; }
cudaError_t cudaMemsetAsync(void *to, int byte, size_t n, cudaStream_t stream) { memset(to, byte, n); return 0; }
cudaError_t cudaMemcpyToSymbol(const void *s, const void *f, size_t n, size_t o, enum cudaMemcpyKind k) { return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered; /* asked of host memory alone, by pinning */
    return 0;
}

/* -- the runtime: streams, events, launches -- */
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { return HANDLE(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return HANDLE(s); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { return OUT(priority, 0); }
cudaError_t cudaStreamQuery(cudaStream_t s) { return 0; }
/* Another stream may be waited for, as PyTorch does as a capture begins. */
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return capturing && s != captured ? 0 : WAITED; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return 0; }
#define STATUS(s) (capturing && (s) == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone)
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    return OUT(status, STATUS(s));
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **needed,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    if (id) *id = 1;
    return OUT(status, STATUS(s));
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    captured = s;
    return OUT(&capturing, 1);
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    capturing = 0;
    return HANDLE(graph);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) { return HANDLE(made); }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return HANDLE(made);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return 0; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made) { return 0; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { return OUT(count, 1); }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return HANDLE(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return HANDLE(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return 0; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return 0; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return 0; } /* not counted: ddp times its first steps so */
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { return OUT(ms, 1.0f); }

cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return LAUNCHED;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) {
    return LAUNCHED;
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared,
                                        cudaStream_t s) {
    return LAUNCHED;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) { return LAUNCHED; }
/* What nvcc of CUDA 13 makes of <<<>>>. */
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { return OUT(kernel, (cudaKernel_t)f); }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t s) {
    return LAUNCHED;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *f) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = 80;
    return 0;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute attribute, int value) { return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t s,
                                                                   unsigned flags) {
    return OUT(n, 2);
}

/* -- the driver -- */
CUresult cuInit(unsigned flags) { return CUDA_ERROR_NO_DEVICE; } /* to NVRTC, which then compiles without one */
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    return OUT(active, 1);
}
CUresult cuGetErrorString(CUresult error, const char **text) { return OUT(text, "no GPU"); }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return OUT(device, ordinal); }
CUresult cuCtxGetCurrent(CUcontext *context) { return OUT(context, (CUcontext)&current); }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream s, void **args, void **extra) {
    return LAUNCHED;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **args, void **extra) {
    return LAUNCHED;
}
CUresult cuModuleLoadData(CUmodule *m, const void *image) { return HANDLE(m); }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { return HANDLE(f); }

/* What makes a handle, what does nothing, and what counts as a launch; under other names here, so that no header has to be there. */
#define NEW(name) \
    int new_##name(void **handle) __asm__(#name); \
    int new_##name(void **handle) { return HANDLE(handle); }
#define NOTHING(name) \
    int nothing_##name(void) __asm__(#name); \
    int nothing_##name(void) { return 0; }
#define LAUNCH(name) \
    int launch_##name(void) __asm__(#name); \
    int launch_##name(void) { return LAUNCHED; }

LAUNCH(cuLaunchCooperativeKernel)
NOTHING(cuCtxSetCurrent) NOTHING(cuDeviceGetAttribute) NOTHING(cuDevicePrimaryCtxRetain) NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuLinkAddData_v2) NOTHING(cuLinkComplete)
 NOTHING(cuLinkCreate_v2) NOTHING(cuModuleLoad) NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload) NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor) NOTHING(cuPointerGetAttribute)
NOTHING(cuTensorMapEncodeTiled)

/* -- cuBLAS -- */
int cublasCreate_v2(void **handle) { return OUT(handle, NULL); } /* which the real functions refuse */
NOTHING(cublasDestroy_v2)
NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetMathMode) NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget)
int cublasGetMathMode(void *handle, int *mode) { return OUT(mode, 0); }
int cublasGetPointerMode_v2(void *handle, int *mode) { return OUT(mode, 0); }
LAUNCH(cublasSgemm_v2) LAUNCH(cublasDgemm_v2) LAUNCH(cublasGemmEx) LAUNCH(cublasSgemmEx)
LAUNCH(cublasSgemmStridedBatched) LAUNCH(cublasDgemmStridedBatched) LAUNCH(cublasGemmStridedBatchedEx)
LAUNCH(cublasSgemv_v2) LAUNCH(cublasDgemv_v2) LAUNCH(cublasSdot_v2) LAUNCH(cublasDdot_v2) LAUNCH(cublasDotEx)
LAUNCH(cublasLtMatmul)
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    memset(results, 0, 96); /* one algorithm, which needs no workspace */
    return OUT(found, 1);
}

/* -- cuDNN: convolutions, each with one engine, of which there is nothing to note -- */
int cudnnCreate(void **handle) { return OUT(handle, NULL); }
NOTHING(cudnnSetStream)
NOTHING(cudnnBackendDestroyDescriptor) LAUNCH(cudnnBackendExecute) NOTHING(cudnnBackendFinalize)
NOTHING(cudnnBackendSetAttribute)
int cudnnBackendCreateDescriptor(int type, void **descriptor) { return HANDLE(descriptor); }
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *found, void *values) {
    enum { NUMERICAL_NOTE = 11, DESCRIPTOR = 15, BEHAVIOR_NOTE = 19 };
    int note = type == NUMERICAL_NOTE || type == BEHAVIOR_NOTE;
    if (found) *found = !note;
    if (values && wanted && !note && type != DESCRIPTOR /* which the caller has made */) *(int64_t *)values = 0;
    return 0;
}

/* -- NCCL: each rank takes the others for its own like -- */
NOTHING(ncclGroupStart) NOTHING(ncclGroupEnd) NOTHING(ncclGetUniqueId)
NOTHING(ncclCommDestroy) NOTHING(ncclCommAbort) NOTHING(ncclCommFinalize)
LAUNCH(ncclBroadcast) LAUNCH(ncclBcast) LAUNCH(ncclReduce) LAUNCH(ncclReduceScatter)
struct comm { int ranks; };
struct id { char bytes[128]; };
static int join(struct comm **comm, int ranks) {
    *comm = malloc(sizeof **comm);
    return OUT(&(*comm)->ranks, ranks);
}
int ncclCommInitRank(struct comm **comm, int ranks, struct id id, int rank) { return join(comm, ranks); }
int ncclCommInitRankConfig(struct comm **comm, int ranks, struct id id, int rank, void *config) {
    return join(comm, ranks);
}
int ncclCommInitAll(struct comm **comms, int count, const int *devices) {
    for (int i = 0; i < count; i++) join(&comms[i], count);
    return 0;
}
int ncclCommGetAsyncError(struct comm *comm, int *error) { return OUT(error, 0); }

static size_t bytes_of(size_t count, int type) {
    static const char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */
    return count * sizes[type];
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, struct comm *comm, cudaStream_t s) {
    memmove(to, from, bytes_of(count, type));
    return LAUNCHED;
}
int ncclAllGather(const void *from, void *to, size_t count, int type, struct comm *comm, cudaStream_t s) {
    size_t n = bytes_of(count, type);
    for (int i = 0; i < comm->ranks; i++) memmove((char *)to + i * n, from, n);
    return LAUNCHED;
}
