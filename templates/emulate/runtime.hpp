// CUDA on a CPU: the core that the primitives of this directory and launch.hpp.j2 stand on.
//
// A CUDA thread is a fiber: made once with makecontext, switched with _setjmp/_longjmp, which save no signal mask and
// so make no system call (about 7 ns a switch). A block runs on one OS thread and its fibers never leave it. Warp
// collectives and barriers are the only places where a fiber gives way; the last to arrive does the work for all.
// Shared memory has a shadow, one record for each 4-byte word, which finds reads of unwritten words, copies that have
// not landed, and races: two threads, one of them writing, with no barrier between them. It compares positions between
// barriers and not moments, so a race is reported whatever order the fibers happened to run in.
//
// Needs C++17 with the GNU builtins (g++ or clang++). Flags, and why:
//   -std=c++17 -O2 -fPIC -shared -pthread
//   -fvisibility=hidden  several libraries made from this text are loaded side by side: only the launch is exported
//   -ffp-contract=off    a multiply and an add stay two roundings, as in the text, on machines with and without FMA
//   -Wno-unknown-pragmas `#pragma unroll` is for the device compiler
// Only C headers that are light: libstdc++'s <math.h> alone would take longer to read than a kernel.

// Its longjmp refuses to leave for another stack, which is what a fiber does.
#undef _FORTIFY_SOURCE
#if defined(__APPLE__) && !defined(_XOPEN_SOURCE)
#define _XOPEN_SOURCE 700                                     // ucontext is hidden without it
#define _DARWIN_C_SOURCE                                      // and MAP_ANON with it
#pragma clang diagnostic ignored "-Wdeprecated-declarations"  // of ucontext, which macOS keeps but no longer likes
#endif

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

extern "C" {
void* realloc(void*, size_t);
void free(void*);
float fmaxf(float, float);
float fminf(float, float);
float fabsf(float);
float fmaf(float, float, float);
}

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline

namespace emu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 LANES = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 MAX_THREADS = 1024;
constexpr u32 MAX_SHARED_BYTES = 1u << 20;  // more than any device has; keeps offsets and sizes far from overflow

// Where dynamic shared memory starts. Not zero, so that an address computed without shared_base() is out of bounds.
constexpr u32 SHARED_BASE = 1024;

// Unwritten shared memory: a signalling NaN as float32 and in both halves as bfloat16, a NaN as float16 too.
constexpr u32 POISON = 0x7fbf7fbfu;

// Measured with g++ -O2: the forward's frame is up to 1.4 KiB, an mma below it 2 KiB, formatting a fault a few more.
constexpr size_t STACK_BYTES = 64 << 10;

struct Dim3 {
    u32 x, y, z;
};

// One tensor that the kernel may touch, as the host passes it.
struct Range {
    u64 address, bytes, writable;
};

struct Launch {
    const char* entry;
    void (*kernel)(const void* params);
    const void* params;
    u32 grid, threads, shared_bytes;
    const Range* ranges;
    u32 n_ranges;
    u64 seed;  // 0: lanes and warps run in their natural order
    u32 next_block;
    u32 fault_block;  // the lowest block that failed, so that the report does not depend on timing; grid: none
    pthread_mutex_t report;
    char* message;
    size_t message_bytes;
};

// What a fiber waits for; `at` is null while it can run.
struct Wait {
    const char* at;
    int line;
    u32 mask;  // lanes that take part, for a warp collective
};

// An asynchronous copy of 16 bytes that has been issued and has not landed. source is null for a zero fill.
struct Copy {
    const void* source;
    u32 offset, group;
};

struct Warp;
struct Block;

struct Fiber {
    jmp_buf context;
    Dim3 thread_idx;
    u32 lane;
    Warp* warp;
    Block* block;
    Wait wait;
    bool exited;
    void* operands;  // of the collective it waits at; on its own stack
    Copy* copies;    // in order of issue
    u32 first_copy, n_copies, copy_capacity;
    u32 group;  // number of cp_async_commit so far
};

struct Warp {
    u32 index;
    u32 ready;    // lanes that can run
    u32 waiting;  // lanes that wait at a collective
    u32 ordered;  // accesses of this warp before this tick are ordered for all its lanes
    Fiber* lanes;
};

// Shadow of 4 bytes of shared memory. Ticks count barriers, block's and warps' alike, over the life of an OS thread, so
// that a new block outdates all records without clearing them.
struct Word {
    u32 write_tick;  // IN_FLIGHT while an asynchronous copy to it has not landed
    u32 read_tick;
    u16 writer;  // thread
    // Two readers since the last barrier, of two warps if there are such: enough to convict any writer. Equal if one.
    u16 reader, other_reader;
    u16 write_line, read_line;
};
constexpr u32 IN_FLIGHT = 0xffffffffu;

// A block that runs, and what its OS thread keeps for the next one.
struct Block {
    Launch* launch;
    Dim3 index, dim, grid;
    jmp_buf home;
    ucontext_t boot;
    Fiber* fibers;
    void* stacks;
    size_t stacks_bytes;
    Warp warps[MAX_THREADS / LANES];
    u32 n_warps;
    u32 ready_warps;
    u32 running;  // threads that have not exited
    u32 at_barrier;
    const Fiber* first_at_barrier;
    u32 tick;
    u32 started;  // tick at which this block began: words written before it are unwritten
    u32 ordered;  // accesses before this tick are ordered for all threads
    u8* shared;
    Word* shadow;
    Range hot_range;  // the last one that an access fell into
    u64 random;
};

static thread_local Fiber* current = nullptr;

// ---- Faults ----

static inline u32 thread_of(const Fiber& fiber) { return fiber.thread_idx.x; }

static void append(char* text, size_t bytes, const char* format, va_list arguments) {
    const size_t length = strlen(text);
    vsnprintf(text + length, bytes - length, format, arguments);
}

__attribute__((format(printf, 3, 4))) static void append(char* text, size_t bytes, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    append(text, bytes, format, arguments);
    va_end(arguments);
}

// Ends the block. The fibers stay where they are: their stacks go with the launch, and nothing on them owns anything.
__attribute__((noreturn, noinline, cold, format(printf, 3, 4))) static void fault(const Fiber& who, int line,
                                                                                  const char* format, ...) {
    Block& block = *who.block;
    Launch& launch = *block.launch;
    pthread_mutex_lock(&launch.report);
    if (block.index.x < __atomic_load_n(&launch.fault_block, __ATOMIC_RELAXED)) {
        __atomic_store_n(&launch.fault_block, block.index.x, __ATOMIC_RELAXED);
        launch.message[0] = 0;
        append(launch.message, launch.message_bytes, "%s, line %d: block %u, warp %u, lane %u: ", launch.entry, line,
               block.index.x, who.warp->index, who.lane);
        va_list arguments;
        va_start(arguments, format);
        append(launch.message, launch.message_bytes, format, arguments);
        va_end(arguments);
    }
    pthread_mutex_unlock(&launch.report);
    _longjmp(block.home, 1);
}

static void describe(const Fiber& fiber, bool several, char* text, size_t bytes) {
    const Wait& wait = fiber.wait;
    if (fiber.exited) return append(text, bytes, "%s exited", several ? "have" : "has");
    append(text, bytes, "%s at %s, line %d", several ? "wait" : "waits", wait.at, wait.line);
    if (wait.mask && wait.mask != ALL_LANES) append(text, bytes, " (mask 0x%08x)", wait.mask);
}

static bool waits_with(const Fiber& a, const Fiber& b) {
    if (a.exited || b.exited) return a.exited && b.exited;
    return a.wait.at == b.wait.at && a.wait.line == b.wait.line && a.wait.mask == b.wait.mask;
}

// Nobody can run and somebody waits: names what is waited for, a thread that never comes, and where all the others are.
__attribute__((noreturn, noinline, cold)) static void deadlock(const Block& block) {
    const u32 threads = block.launch->threads;
    const bool barrier = block.at_barrier != 0;
    const Fiber* waiting = block.first_at_barrier;
    for (u32 i = 0; i < threads && !barrier; i++) {
        waiting = &block.fibers[i];
        if (!waiting->exited) break;
    }

    const u32 first = barrier ? 0 : waiting->warp->index * LANES;
    const Fiber* missing = nullptr;
    u32 n_missing = 0;
    for (u32 i = first; i < (barrier ? threads : first + LANES); i++) {
        const Fiber& fiber = block.fibers[i];
        if (waits_with(fiber, *waiting) || (!barrier && !(waiting->wait.mask >> fiber.lane & 1))) continue;
        if (!missing) missing = &fiber;
        n_missing++;
    }
    if (!missing) missing = waiting;

    char who[256] = "";
    append(who, sizeof who, "warp %u, lane %u ", missing->warp->index, missing->lane);
    describe(*missing, false, who, sizeof who);
    char groups[1024] = "";
    for (u32 i = 0; i < threads; i++) {
        const Fiber& fiber = block.fibers[i];
        bool seen = false;
        for (u32 j = 0; j < i && !seen; j++) seen = waits_with(block.fibers[j], fiber);
        if (seen) continue;
        u32 count = 0;
        for (u32 j = i; j < threads; j++) count += waits_with(block.fibers[j], fiber);
        append(groups, sizeof groups, "\n  %u of %u threads ", count, threads);
        describe(fiber, count > 1, groups, sizeof groups);
        append(groups, sizeof groups, "; the first is warp %u, lane %u", fiber.warp->index, fiber.lane);
    }
    fault(*missing, waiting->wait.line,
          "%s at line %d: %u thread%s never reach%s it; e.g. %s%s\n  Look for a branch or a return that not all take.",
          barrier ? "barrier" : waiting->wait.at, waiting->wait.line, n_missing, n_missing == 1 ? "" : "s",
          n_missing == 1 ? "es" : "", who, groups);
}

// ---- Fibers and their order ----

// The first set bit of mask at or after start, going round.
static inline u32 first_from(u32 mask, u32 start) {
    start &= 31;
    const u32 turned = mask >> start | mask << (-start & 31);
    return (start + __builtin_ctz(turned)) & 31;
}

static inline u32 draw(Block& block) {  // splitmix64
    u64 z = block.random += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (u32)(z >> 32);
}

// Who runs next, or null. Unseeded: the first lane that can from this one on, in this warp, else in the next that can.
// Seeded: any lane, and one time in eight of any warp.
static inline Fiber* choose(Block& block, u32 warp, u32 lane) {
    if (!block.ready_warps) return nullptr;
    bool leave = !block.warps[warp].ready;
    u32 warp_start = warp + 1;
    if (block.launch->seed) {
        const u32 bits = draw(block);
        lane = bits;
        warp_start = (bits >> 8) % block.n_warps;
        leave |= (bits >> 5 & 7) == 0;
    }
    if (leave) warp = first_from(block.ready_warps, warp_start);
    return &block.warps[warp].lanes[first_from(block.warps[warp].ready, lane)];
}

static inline void make_ready(Block& block, Warp& warp, u32 lanes) {
    warp.ready |= lanes;
    block.ready_warps |= 1u << warp.index;
}

// Runs `next`, or ends the block without one, until somebody switches back. Not inlined: setjmp pessimises its caller.
__attribute__((noinline)) static void switch_to(Fiber& self, Fiber* next) {
    if (next == &self || _setjmp(self.context)) return;
    if (!next) _longjmp(self.block->home, 1);
    current = next;
    _longjmp(next->context, 1);
}

// Gives way until somebody makes this fiber ready again.
static void suspend(Fiber& self) {
    Block& block = *self.block;
    Warp& warp = *self.warp;
    warp.ready &= ~(1u << self.lane);
    if (!warp.ready) block.ready_warps &= ~(1u << warp.index);
    Fiber* next = choose(block, warp.index, self.lane + 1);
    if (!next && block.running) deadlock(block);
    switch_to(self, next);
}

static void fiber_main() {
    Fiber& self = *current;
    if (!_setjmp(self.context)) setcontext(&self.block->boot);
    for (;;) {  // one round a block
        self.block->launch->kernel(self.block->launch->params);
        self.exited = true;
        self.block->running--;
        suspend(self);
    }
}

// ---- Warp collectives and barriers ----

// Waits for the lanes of mask; the last to arrive runs compute(warp, mask, line) for all. Other lanes of the warp may
// meanwhile be in a collective of their own with another mask.
__attribute__((noinline)) static void collective(const char* name, u32 mask, void* operands, int line,
                                                 void (*compute)(Warp&, u32 mask, int line)) {
    Fiber& self = *current;
    Warp& warp = *self.warp;
    if (!(mask >> self.lane & 1))
        fault(self, line, "%s with mask 0x%08x, which leaves out the calling lane.\n  Look for a wrong mask.", name,
              mask);
    self.wait = {name, line, mask};
    self.operands = operands;
    warp.waiting |= 1u << self.lane;
    bool complete = !(mask & ~warp.waiting);
    for (u32 lanes = complete ? mask : 0; lanes; lanes &= lanes - 1) {
        const Fiber& other = warp.lanes[__builtin_ctz(lanes)];
        if (other.wait.mask != mask) {
            complete = false;
        } else if (other.wait.line != line || other.wait.at != name) {
            fault(self, line,
                  "divergence: this lane is at %s, line %d, while lane %u waits at %s, line %d. A warp's lanes must "
                  "reach the same call.\n  Look for a branch whose condition differs within the warp.",
                  name, line, other.lane, other.wait.at, other.wait.line);
        }
    }
    if (!complete) return suspend(self);
    compute(warp, mask, line);
    warp.waiting &= ~mask;
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) warp.lanes[__builtin_ctz(lanes)].wait.at = nullptr;
    make_ready(*self.block, warp, mask);
    switch_to(self, choose(*self.block, warp.index, 0));
}

// With a partial mask it orders the whole warp: it may then miss a race, but never invents one.
static void order_warp(Warp& warp, u32, int) { warp.ordered = ++warp.lanes->block->tick; }

// Ballot: each lane brings its predicate and takes away the mask of the lanes where it holds.
static void vote(Warp& warp, u32 mask, int) {
    u32 ballot = 0;
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        const u32 lane = __builtin_ctz(lanes);
        ballot |= (u32)(*(u32*)warp.lanes[lane].operands != 0) << lane;
    }
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) *(u32*)warp.lanes[__builtin_ctz(lanes)].operands = ballot;
}

struct Shuffle {
    u32 value, source;
};

static void shuffle(Warp& warp, u32 mask, int line) {
    u32 values[LANES] = {};
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        const u32 lane = __builtin_ctz(lanes);
        values[lane] = ((Shuffle*)warp.lanes[lane].operands)->value;
    }
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        const Fiber& fiber = warp.lanes[__builtin_ctz(lanes)];
        Shuffle& mine = *(Shuffle*)fiber.operands;
        if (mine.source >= LANES || !(mask >> mine.source & 1))
            fault(fiber, line,
                  "shuffle from lane %u, which takes no part (mask 0x%08x).\n  Look for a wrong mask or offset.",
                  mine.source, mask);
        mine.value = values[mine.source];
    }
}

static void block_barrier(int line) {
    Fiber& self = *current;
    Block& block = *self.block;
    self.wait = {"__syncthreads", line, 0};
    if (!block.at_barrier++) block.first_at_barrier = &self;
    const Fiber& first = *block.first_at_barrier;
    if (first.wait.line != line)
        fault(self, line,
              "divergent barrier: this thread is at the __syncthreads of line %d, while warp %u, lane %u waits at the "
              "one of line %d.\n  Look for a branch whose condition differs within the block.",
              line, first.warp->index, first.lane, first.wait.line);
    if (block.at_barrier < block.launch->threads) return suspend(self);
    block.at_barrier = 0;
    block.ordered = ++block.tick;
    for (u32 i = 0; i < block.launch->threads; i++) block.fibers[i].wait.at = nullptr;
    for (u32 i = 0; i < block.n_warps; i++) make_ready(block, block.warps[i], ALL_LANES);
    switch_to(self, choose(block, 0, 0));
}

}  // namespace emu

// ---- What a CUDA compiler knows without being told ----

#define threadIdx (emu::current->thread_idx)
#define blockIdx (emu::current->block->index)
#define blockDim (emu::current->block->dim)
#define gridDim (emu::current->block->grid)

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

// The last parameter of these and of the primitives is never given: it is the line of the call in this file.

static inline void __syncthreads(int line = __builtin_LINE()) { emu::block_barrier(line); }

static inline void __syncwarp(unsigned mask = emu::ALL_LANES, int line = __builtin_LINE()) {
    emu::collective("__syncwarp", mask, nullptr, line, emu::order_warp);
}

template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int line = __builtin_LINE()) {
    static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
    emu::Shuffle shuffle = {0, emu::current->lane ^ (unsigned)lane_mask};
    memcpy(&shuffle.value, &value, 4);
    emu::collective("__shfl_xor_sync", mask, &shuffle, line, emu::shuffle);
    memcpy(&value, &shuffle.value, 4);
    return value;
}

static inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    unsigned vote = predicate != 0;
    emu::collective("__any_sync", mask, &vote, line, emu::vote);
    return vote != 0;
}

static inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    unsigned vote = predicate != 0;
    emu::collective("__all_sync", mask, &vote, line, emu::vote);
    return vote == mask;
}
