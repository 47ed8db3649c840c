/* A stand-in for NVIDIA's management library, libnvidia-ml.so.1: it answers as the host that a file describes.
 *
 * STAND_IN_NVML names that file (hosts/ has some, and says what a line means), read at each initialization; without it
 * no driver is loaded. STAND_IN_NVML_LOG names a file that gets a line "process function" for each call.
 *
 * What a function answers, and with which error, is NVIDIA's API reference: docs.nvidia.com/deploy/nvml-api.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, LIBRARY_NOT_FOUND = 12, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, UNKNOWN = 999 };
static const struct { int code; const char *name, *text; } ERRORS[] = {
    {UNINITIALIZED, "UNINITIALIZED", "Uninitialized"},
    {INVALID_ARGUMENT, "INVALID_ARGUMENT", "Invalid Argument"},
    {NOT_SUPPORTED, "NOT_SUPPORTED", "Not Supported"},
    {NO_PERMISSION, "NO_PERMISSION", "Insufficient Permissions"},
    {NOT_FOUND, "NOT_FOUND", "Not Found"},
    {DRIVER_NOT_LOADED, "DRIVER_NOT_LOADED", "Driver Not Loaded"},
    {LIBRARY_NOT_FOUND, "LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"},
    {FUNCTION_NOT_FOUND, "FUNCTION_NOT_FOUND", "Function Not Found"},
    {GPU_IS_LOST, "GPU_IS_LOST", "GPU is lost"},
    {UNKNOWN, "UNKNOWN", "Unknown Error"},
};

enum { MAX_GPUS = 16, MAX_SLICES = 7, TEXT = 96, MAX_LINKS = 36, MAX_PROCESSES = 4 };
enum { HANDLE, UUID, NAME, MEMORY, UTILIZATION, CAPABILITY, CORES, POWER, TEMPERATURE, CLOCK, P2P, NVLINK, MIG, REASONS,
       ENERGY, MAX_CLOCK, THROUGHPUT, FIELDS, PROCESSES, PERSISTENCE, ALL, QUESTIONS };
static const char *const QUESTION[] = {"handle", "uuid", "name", "memory", "utilization", "capability", "cores",
    "power", "temperature", "clock", "p2p", "nvlink", "mig", "reasons", "energy", "max_clock", "throughput", "fields",
    "processes", "persistence", "all"};
/* What nvmlDeviceGetFieldValues is asked for, in KiB, of all links with this scope. */
enum { NVLINK_TX_KIB = 138, NVLINK_RX_KIB = 139 };
static const unsigned ALL_LINKS = 0xffffffff;

typedef struct Device {
    struct Device *gpu; /* that this is a slice of; NULL for a whole GPU */
    char name[TEXT], uuid[TEXT];
    unsigned long long memory, used; /* bytes */
    int fails[QUESTIONS];            /* the error by which a question is answered */
    int major, minor, mig_mode, exclusive, not_persistent, slices;
    unsigned cores, utilization, milliwatts, celsius, megahertz, max_megahertz, links, p2p_write, p2p_nvlink;
    unsigned long long reasons, pcie, nvlink; /* bytes and KiB a second */
    unsigned processes, pids[MAX_PROCESSES];
} Device;

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned field, scope; long long time, latency; int type, error; unsigned long long value; } Field;

static Device gpus[MAX_GPUS], slices[MAX_GPUS][MAX_SLICES];
static unsigned count;
static int initialized, cuda, init_fails, count_fails, driver_fails;
static char driver[TEXT];

static int called(const char *function)
{
    const char *name = getenv("STAND_IN_NVML_LOG");
    FILE *log = name ? fopen(name, "a") : NULL;
    if (log) {
        fprintf(log, "%d %s\n", (int)getpid(), function);
        fclose(log);
    }
    return initialized ? SUCCESS : UNINITIALIZED;
}

/* What a question of a device is answered by; a slice fails as its GPU does. */
static int asked(const char *function, const Device *device, int question)
{
    const Device *gpu = device && device->gpu ? device->gpu : device;
    int error = called(function);
    if (error)
        return error;
    if (!device)
        return INVALID_ARGUMENT;
    return gpu->fails[ALL] ? gpu->fails[ALL] : gpu->fails[question];
}

static int put(char *to, unsigned size, const char *text)
{
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* -- the description of a host ----------------------------------------------------------------------------------- */

static void wrong(const char *line)
{
    fprintf(stderr, "the stand-in NVML does not know this line: %s", line);
    abort();
}

static int index_of(const char *const *names, int length, const char *name)
{
    for (int i = 0; i < length; i++)
        if (!strcmp(names[i], name))
            return i;
    return -1;
}

static int error_of(const char *name)
{
    for (unsigned i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (!strcmp(ERRORS[i].name, name))
            return ERRORS[i].code;
    return 0;
}

static void add_slice(Device *gpu, const char *profile, unsigned long long mib)
{
    int index = gpu->slices++, number = (int)(gpu - gpus);
    Device *slice = &slices[number][index];
    *slice = *gpu;
    slice->gpu = gpu;
    slice->memory = mib << 20;
    snprintf(slice->name, TEXT, "%.60s MIG %.20s", gpu->name, profile);
    snprintf(slice->uuid, TEXT, "MIG-%08x-0000-5000-8000-%012x", number, index);
}

/* One line about one GPU: a word, and what follows it. */
static int describe(Device *gpu, const char *word, const char *rest)
{
    char text[TEXT], error[TEXT];
    unsigned long long number = strtoull(rest, NULL, 0);
    if (!strcmp(word, "name")) snprintf(gpu->name, TEXT, "%s", rest);
    else if (!strcmp(word, "memory_mib")) gpu->memory = number << 20;
    else if (!strcmp(word, "used_mib")) gpu->used = number << 20;
    else if (!strcmp(word, "capability")) return sscanf(rest, "%d.%d", &gpu->major, &gpu->minor) == 2;
    else if (!strcmp(word, "cores")) gpu->cores = (unsigned)number;
    else if (!strcmp(word, "utilization")) gpu->utilization = (unsigned)number;
    else if (!strcmp(word, "milliwatts")) gpu->milliwatts = (unsigned)number;
    else if (!strcmp(word, "celsius")) gpu->celsius = (unsigned)number;
    else if (!strcmp(word, "megahertz")) gpu->megahertz = (unsigned)number;
    else if (!strcmp(word, "max_megahertz")) gpu->max_megahertz = (unsigned)number;
    else if (!strcmp(word, "pcie_bytes_per_s")) gpu->pcie = number;
    else if (!strcmp(word, "nvlink_kib_per_s")) gpu->nvlink = number;
    else if (!strcmp(word, "process") && gpu->processes < MAX_PROCESSES)
        gpu->pids[gpu->processes++] = (unsigned)number;
    else if (!strcmp(word, "nvlinks")) gpu->links = (unsigned)number;
    else if (!strcmp(word, "p2p_write")) gpu->p2p_write = (unsigned)number;
    else if (!strcmp(word, "p2p_nvlink")) gpu->p2p_nvlink = (unsigned)number;
    else if (!strcmp(word, "reasons")) gpu->reasons = number;
    else if (!strcmp(word, "mig")) gpu->mig_mode = !strcmp(rest, "on");
    else if (!strcmp(word, "persistence")) gpu->not_persistent = !strcmp(rest, "off");
    else if (!strcmp(word, "mode")) gpu->exclusive = !strcmp(rest, "exclusive");
    else if (!strcmp(word, "slice") && gpu->slices < MAX_SLICES && sscanf(rest, "%90s %llu", text, &number) == 2)
        add_slice(gpu, text, number);
    else if (!strcmp(word, "fails") && sscanf(rest, "%90s %90s", text, error) == 2) {
        int question = index_of(QUESTION, QUESTIONS, text);
        if (question < 0 || !error_of(error))
            return 0;
        gpu->fails[question] = error_of(error);
    } else
        return 0;
    return 1;
}

static int read_host(const char *path)
{
    char line[256], word[TEXT], rest[TEXT];
    unsigned first = 0, end = 0, major, minor;
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file)
        return DRIVER_NOT_LOADED;
    memset(gpus, 0, sizeof gpus);
    memset(slices, 0, sizeof slices);
    count = 0, cuda = 0, driver[0] = 0, init_fails = 0, count_fails = 0, driver_fails = 0;
    while (fgets(line, sizeof line, file)) {
        int words = sscanf(line, "%90s %90[^\n]", word, rest), known = 1;
        if (words < 1 || word[0] == '#')
            continue;
        if (words < 2)
            wrong(line);
        if (!strcmp(word, "driver"))
            snprintf(driver, TEXT, "%s", rest);
        else if (!strcmp(word, "cuda") && sscanf(rest, "%u.%u", &major, &minor) == 2)
            cuda = (int)(1000 * major + 10 * minor);
        else if (!strcmp(word, "init_fails"))
            known = (init_fails = error_of(rest));
        else if (!strcmp(word, "count_fails"))
            known = (count_fails = error_of(rest));
        else if (!strcmp(word, "driver_fails"))
            known = (driver_fails = error_of(rest));
        else if (!strcmp(word, "gpus") && count + strtoul(rest, NULL, 10) <= MAX_GPUS) {
            first = count, end = count += (unsigned)strtoul(rest, NULL, 10);
            for (unsigned i = first; i < end; i++)
                snprintf(gpus[i].uuid, TEXT, "GPU-%08x-0000-4000-8000-000000000000", i);
        } else if (!strcmp(word, "gpu") && strtoul(rest, NULL, 10) < count)
            first = (unsigned)strtoul(rest, NULL, 10), end = first + 1;
        else
            for (unsigned i = first; known && i < end; i++)
                known = describe(&gpus[i], word, rest);
        if (!known)
            wrong(line);
    }
    fclose(file);
    return init_fails;
}

/* -- NVML's functions -------------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    called("nvmlInitWithFlags");
    int error = read_host(getenv("STAND_IN_NVML"));
    initialized += !error;
    return error;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    int error = called("nvmlShutdown");
    initialized -= !error;
    return error;
}

const char *nvmlErrorString(int code)
{
    for (unsigned i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code)
            return ERRORS[i].text;
    return code ? "Unknown Error" : "Success";
}

int nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    int error = called("nvmlSystemGetDriverVersion");
    if (!error)
        error = driver_fails;
    return error ? error : put(version, size, driver);
}

/* The real one opens libcuda.so.1 in this process, and asks it. */
int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    int error = called("nvmlSystemGetCudaDriverVersion");
    *version = cuda;
    return error ? error : cuda ? SUCCESS : LIBRARY_NOT_FOUND;
}

int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

int nvmlDeviceGetCount_v2(unsigned *number)
{
    *number = count; /* also those that this process has no permission for */
    int error = called("nvmlDeviceGetCount");
    return error ? error : count_fails;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device)
{
    *device = index < count ? &gpus[index] : NULL;
    return asked("nvmlDeviceGetHandleByIndex", *device, HANDLE);
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size)
{
    int error = asked("nvmlDeviceGetUUID", device, UUID);
    return error ? error : put(uuid, size, device->uuid);
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size)
{
    int error = asked("nvmlDeviceGetName", device, NAME);
    return error ? error : put(name, size, device->name);
}

/* What a counter has reached that rises by so much a second. */
static unsigned long long reached(unsigned long long per_second)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    const char *file = getenv("STAND_IN_NVML_CLOCK");
    if (file) {
        FILE *clock = fopen(file, "r");
        if (!clock || fscanf(clock, "%lf", &seconds) != 1)
            abort();
        fclose(clock);
    }
    return (unsigned long long)((double)per_second * seconds);
}

/* A function that answers one question about a device, or NOT_SUPPORTED where SUPPORTED is false: a MIG slice lacks most
   figures of its GPU. Its parameters behind the device come last. */
#define ANSWERS(FUNCTION, QUESTION, SUPPORTED, ANSWER, ...)                                                            \
    int FUNCTION(Device *device, __VA_ARGS__)                                                                          \
    {                                                                                                                  \
        int error = asked(#FUNCTION, device, QUESTION);                                                                \
        if (error || !(SUPPORTED))                                                                                     \
            return error ? error : NOT_SUPPORTED;                                                                      \
        ANSWER;                                                                                                        \
        return SUCCESS;                                                                                                \
    }
#define UNUSED __attribute__((unused))
ANSWERS(nvmlDeviceGetMemoryInfo, MEMORY, 1,
        *memory = ((Memory){device->memory, device->memory - device->used, device->used}), Memory *memory)
ANSWERS(nvmlDeviceGetCudaComputeCapability, CAPABILITY, 1,
        (*major = device->major, *minor = device->minor), int *major, int *minor)
ANSWERS(nvmlDeviceGetNumGpuCores, CORES, !device->gpu, *cores = device->cores, unsigned *cores)
ANSWERS(nvmlDeviceGetPowerUsage, POWER, !device->gpu, *milliwatts = device->milliwatts, unsigned *milliwatts)
ANSWERS(nvmlDeviceGetPersistenceMode, PERSISTENCE, !device->gpu, *mode = !device->not_persistent, unsigned *mode)
ANSWERS(nvmlDeviceGetCurrentClocksEventReasons, REASONS, !device->gpu,
        *reasons = device->reasons, unsigned long long *reasons)
ANSWERS(nvmlDeviceGetTotalEnergyConsumption, ENERGY, !device->gpu,
        *millijoules = reached(device->milliwatts), unsigned long long *millijoules)
ANSWERS(nvmlDeviceGetMaxClockInfo, MAX_CLOCK, !device->gpu,
        *megahertz = device->max_megahertz, UNUSED int type, unsigned *megahertz)
ANSWERS(nvmlDeviceGetClockInfo, CLOCK, !device->gpu,
        *megahertz = device->megahertz, UNUSED int type, unsigned *megahertz)
ANSWERS(nvmlDeviceGetTemperature, TEMPERATURE, !device->gpu && !sensor,
        *celsius = device->celsius, int sensor, unsigned *celsius)
/* The real one takes 20 ms, over which it counts. */
ANSWERS(nvmlDeviceGetPcieThroughput, THROUGHPUT, !device->gpu,
        (usleep(20000), *kilobytes = (unsigned)(device->pcie / 1000)), UNUSED int direction, unsigned *kilobytes)
/* "on MIG-enabled GPUs" it is not supported */
ANSWERS(nvmlDeviceGetUtilizationRates, UTILIZATION, !device->gpu && !device->mig_mode,
        rates->gpu = rates->memory = device->utilization, Utilization *rates)
/* nor MIG before Ampere */
ANSWERS(nvmlDeviceGetMigMode, MIG, !device->gpu && device->major >= 8,
        *current = *pending = (unsigned)device->mig_mode, unsigned *current, unsigned *pending)

int nvmlDeviceGetFieldValues(Device *device, int number, Field *fields)
{
    int error = asked("nvmlDeviceGetFieldValues", device, FIELDS);
    if (error || device->gpu)
        return error ? error : NOT_SUPPORTED;
    for (Field *field = fields; field < fields + number; field++) {
        int nvlink = (field->field == NVLINK_TX_KIB || field->field == NVLINK_RX_KIB) && field->scope == ALL_LINKS;
        field->error = nvlink && device->links ? SUCCESS : NOT_SUPPORTED;
        field->value = reached(device->nvlink);
    }
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *number, Process *processes)
{
    int error = asked("nvmlDeviceGetComputeRunningProcesses", device, PROCESSES);
    if (error)
        return error;
    unsigned room = processes ? *number : 0;
    *number = device->processes;
    if (room < device->processes)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < device->processes; i++)
        processes[i] = (Process){.pid = device->pids[i], .memory = 1 << 20};
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(Device *one, Device *other, int capability, unsigned *status)
{
    int error = asked("nvmlDeviceGetP2PStatus", one, P2P);
    if (!error)
        error = asked("nvmlDeviceGetP2PStatus", other, P2P);
    if (error || one->gpu || other->gpu)
        return error ? error : NOT_SUPPORTED;
    *status = capability == 2 ? one->p2p_nvlink : one->p2p_write; /* 2: NVML_P2P_CAPS_INDEX_NVLINK */
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *active)
{
    int error = asked("nvmlDeviceGetNvLinkState", device, NVLINK);
    if (error || device->gpu || !device->links)
        return error ? error : NOT_SUPPORTED;
    if (link >= MAX_LINKS)
        return INVALID_ARGUMENT;
    *active = link < device->links;
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(Device *device, unsigned *mode)
{
    *mode = device->exclusive ? 3 : 0; /* a process alone, or any number */
    return asked("nvmlDeviceGetComputeMode", device, MIG);
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *number)
{
    *number = MAX_SLICES;
    return asked("nvmlDeviceGetMaxMigDeviceCount", device, MIG);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **slice)
{
    int error = asked("nvmlDeviceGetMigDeviceHandleByIndex", device, MIG);
    if (error || (int)index >= device->slices)
        return error ? error : NOT_FOUND;
    *slice = &slices[device - gpus][index];
    return SUCCESS;
}
