// CUDA on a CPU: the core that the primitives of this directory and launch.hpp.j2 stand on.
//
// A CUDA thread is a fiber: made once with makecontext, switched with _setjmp/_longjmp, which save no signal mask and
// so make no system call (about 7 ns a switch). A block runs on one OS thread and its fibers never leave it. Warp
// collectives and barriers are the only places where a fiber gives way; the last to arrive does the work for all.
// Shared memory has a shadow, one record for each 4-byte word, which finds reads of unwritten words, copies that have
// not landed, and races: two threads, one of them writing, with no barrier between them. It compares positions between
// barriers and not moments, so a race is reported whatever order the fibers happened to run in.
//
// A block that uses more than __syncthreads and __syncwarp (mbarriers, named barriers, asynchronous products, the copy
// engine) is `pipelined`: each thread then has a vector of clocks, which says up to which tick the accesses of each
// other actor happened before. Barriers carry those vectors from who arrives to who waits.
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
constexpr u32 GROUP_WARPS = 4;  // of a warpgroup
constexpr u32 GROUP_THREADS = GROUP_WARPS * LANES;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 MAX_THREADS = 1024;
constexpr u32 MAX_WARPS = MAX_THREADS / LANES;
constexpr u32 MAX_GROUPS = MAX_THREADS / GROUP_THREADS;
constexpr u32 MAX_MBARRIERS = 64;
constexpr u32 NAMED_BARRIERS = 16;
constexpr u32 REGISTER_FILE = 65536;        // of a multiprocessor; a block that budgets registers has it to itself
constexpr u32 MAX_SHARED_BYTES = 1u << 20;  // more than any device has; keeps offsets and sizes far from overflow

// Where dynamic shared memory starts. Not zero, so that an address computed without shared_base() is out of bounds.
constexpr u32 SHARED_BASE = 1024;

// Unwritten shared memory: a signalling NaN as float32 and in both halves as bfloat16, a NaN as float16 too.
constexpr u32 POISON = 0x7fbf7fbfu;

// Measured with g++ -O2: the forward's frame is up to 1.4 KiB, an mma below it 2 KiB, formatting a fault a few more. A
// Hopper forward has 2 KiB with its parameters, and 0.4 below it; naming a deadlock takes 3.5.
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

enum WaitKind : u32 { WAIT_WARP_OR_BLOCK, WAIT_GROUP, WAIT_MBARRIER, WAIT_NAMED, WAIT_REGISTERS };

// What a fiber waits for; `at` is null while it can run.
struct Wait {
    const char* at;
    int line;
    u32 mask;  // lanes that take part, for a warp collective
};

// What it waits for beyond the threads of its warp or block.
struct Awaited {
    WaitKind kind;
    u32 object;  // index of the mbarrier, number of the named barrier, registers wanted
    u32 parity;
};

// An asynchronous copy that has been issued and has not landed. source is null for a zero fill.
struct Copy {
    const void* source;
    u32 bytes, offset, group;
};

struct Warp;
struct Block;

constexpr u32 FENCES = 8;

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
    // Of a pipelined block:
    Awaited awaited;
    u32* clocks;         // accesses of an actor before its clock here are ordered before this thread's; see Clocks
    u32 bulk_group;      // number of tma_store_commit so far
    u32 n_fences;        // number of fence_proxy_async so far
    u32 fences[FENCES];  // ticks of the newest ones
};

struct Warp {
    u32 index;
    u32 ready;    // lanes that can run
    u32 waiting;  // lanes that wait at a collective
    u32 ordered;  // accesses of this warp before this tick are ordered for all its lanes
    Fiber* lanes;
    u32 elected;  // the lane that arrives alone where not all do; LANES: none yet
};

// A barrier's part in the order: what its arrivals of this phase bring, and what those of completed phases brought.
struct Sync {
    u32 *arriving, *completed;  // clocks
    u32 arrived[MAX_WARPS];     // lanes, this phase
    u32 last[MAX_WARPS];        // tick of the latest arrival of any lane
    u32 elected[MAX_WARPS];     // and of the elected one; 0: none
    u32 previous[MAX_WARPS];    // `last` of the phase before; 0: the warp had no part in it
};

struct Mbarrier {
    Sync sync;
    u32 offset;    // of the object in shared memory
    u32 expected;  // arrivals a phase
    u32 pending;   // arrivals that this phase still waits for
    int bytes;     // and bytes; negative where copies have landed that nobody has announced
    u32 phase;
    u32 phase_bytes;  // landed in this phase
    u32 landed;       // 1 + the latest completed phase with bytes
    u32 awaited;      // 1 + the latest phase that somebody has waited for
    u32 init_thread, init_tick;
    int init_line;
    bool fenced;  // for the copy engine, by mbarrier_init_fence
};

struct NamedBarrier {
    Sync sync;
    u32 expected, arrived;  // threads; none expected: unused since it last completed
    u32 generation;
    u32 first;  // thread
    int first_line;
};

struct Group {
    u32 arrived;  // threads at a collective of the warpgroup
    Fiber* first;
    u32 registers;  // a thread
    u32 wanted;     // by a setmaxnreg_inc that waits, or 0
};

// Shadow of 4 bytes of shared memory. Ticks count barriers, block's and warps' alike, over the life of an OS thread, so
// that a new block outdates all records without clearing them.
struct Word {
    u32 write_tick;  // or one of the marks below
    u32 read_tick;
    u16 writer;  // thread
    // Two readers since the last barrier, of two warps if there are such: enough to convict any writer. Equal if one.
    u16 reader, other_reader;
    u16 write_line, read_line;
    u16 readers;  // where read_tick is MANY: the index of its Readers
};
constexpr u32 IN_FLIGHT = 0xffffffffu;   // write_tick: an asynchronous copy of `writer` has not landed
constexpr u32 MANY = 0xfffffffeu;        // read_tick: several warps read it, none ordered before another
constexpr u32 LOADING = 0xfffffffdu;     // write_tick: a copy of the engine that `writer` issued has not landed
constexpr u32 MBARRIER = 0xfffffffcu;    // write_tick: part of the mbarrier number `writer`
constexpr u32 BY_ENGINE = 0x80000000u;   // write_tick, with the tick: the copy engine wrote it, for mbarrier `writer`
constexpr u32 MOST_TICKS = 0x7fffffffu;  // beyond are the marks

// Reads of a word by one warp, where the word has several that are not ordered: by two lanes, or by one, twice.
struct Reader {
    u32 tick, other_tick;  // 0: none
    u16 lane, other_lane, line;
};

// The latest read of 16 bytes of shared memory by one unit that reads asynchronously: the tensor cores of each
// warpgroup, by its index, and after them the copy engine.
struct UnitReader {
    u32 tick;
    u16 line;
    u16 thread;  // that issued the copy
};

struct Engine;
struct Products;

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
    Fiber* first_at_barrier;
    u32 tick;
    u32 started;   // tick at which this block began: words written before it are unwritten
    u32 ordered;   // accesses before this tick are ordered for all threads
    u32 outdated;  // records before this tick need no look: `ordered`, or 0 where the block is pipelined
    u8* shared;
    Word* shadow;
    Range hot_range;  // the last one that an access fell into
    u64 random;

    // Of pipelined blocks only, made when the first one needs it.
    bool pipelined;
    bool unit_reads;  // somebody reads shared memory asynchronously
    u32 n_groups;
    u32 n_clocks, max_clocks;
    u32* all_clocks;  // of fibers and barriers
    size_t clocks_bytes;
    u32* scratch;  // clocks, for the moment
    Mbarrier* mbarriers;
    u32 n_mbarriers;
    NamedBarrier* named;
    Group groups[MAX_GROUPS];
    Reader* readers;           // n_warps for each index
    u32 n_readers;             // indices used so far, from 1
    u32 free_readers;          // the first index that is free again; `tick` of its first Reader is the next
    UnitReader* unit_readers;  // n_groups + 1 for each 16 bytes
    Engine* engine;
    bool (*land)(Block&);         // lets a copy land; false: there is none in flight
    void (*leave)(Fiber&);        // a thread exits
    void (*finish)(Fiber& last);  // all threads have exited
    Products* products[MAX_GROUPS];
    struct Owned {
        void* memory;
        size_t bytes;
    } owned[16];
    u32 n_owned;
};

static thread_local Fiber* current = nullptr;
static void (*block_ended)(const Block&) = nullptr;  // told of each block that ended well, by banks.hpp.j2 alone

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
    const Block& block = *fiber.block;
    const Awaited& awaited = fiber.awaited;
    if (awaited.kind == WAIT_MBARRIER) {
        const Mbarrier& barrier = block.mbarriers[awaited.object];
        append(text, bytes,
               ", for parity %u of the mbarrier at shared byte %u (in phase %u, parity %u: ", awaited.parity,
               barrier.offset, barrier.phase, barrier.phase & 1);
        append(text, bytes, "%u of %u arrivals and %d bytes are missing)", barrier.pending, barrier.expected,
               barrier.bytes);
    } else if (awaited.kind == WAIT_NAMED) {
        const NamedBarrier& barrier = block.named[awaited.object];
        append(text, bytes, ", for barrier %u (%u of %u threads have arrived)", awaited.object, barrier.arrived,
               barrier.expected);
    } else if (awaited.kind == WAIT_REGISTERS) {
        u32 taken = 0;
        for (u32 i = 0; i < block.n_groups; i++) taken += block.groups[i].registers;
        append(text, bytes, ", for %u registers a thread (it has %u; all warpgroups together %u)", awaited.object,
               block.groups[fiber.warp->index / GROUP_WARPS].registers, taken);
    }
}

static bool waits_with(const Fiber& a, const Fiber& b) {
    if (a.exited || b.exited) return a.exited && b.exited;
    if (a.wait.at != b.wait.at || a.wait.line != b.wait.line || a.wait.mask != b.wait.mask) return false;
    return a.awaited.kind == b.awaited.kind && a.awaited.object == b.awaited.object &&
           a.awaited.parity == b.awaited.parity;
}

// Where all threads of the block are, those that wait at one place together.
static void describe_all(const Block& block, char* text, size_t bytes) {
    const u32 threads = block.launch->threads;
    for (u32 i = 0; i < threads; i++) {
        const Fiber& fiber = block.fibers[i];
        bool seen = false;
        for (u32 j = 0; j < i && !seen; j++) seen = waits_with(block.fibers[j], fiber);
        if (seen) continue;
        u32 count = 0;
        for (u32 j = i; j < threads; j++) count += waits_with(block.fibers[j], fiber);
        append(text, bytes, "\n  %u of %u threads ", count, threads);
        describe(fiber, count > 1, text, bytes);
        append(text, bytes, "; the first is warp %u, lane %u", fiber.warp->index, fiber.lane);
    }
}

// Nobody can run and somebody waits: names what is waited for, a thread that never comes, and where all the others are.
__attribute__((noreturn, noinline, cold)) static void deadlock(const Block& block) {
    const u32 threads = block.launch->threads;
    char groups[2560] = "";
    describe_all(block, groups, sizeof groups);
    // Registers first, for others may wait for those who wait for them; then named barriers.
    const Fiber* first = nullptr;
    for (u32 i = 0; i < threads; i++) {
        const Fiber& fiber = block.fibers[i];
        if (!fiber.exited && (!first || fiber.awaited.kind > first->awaited.kind)) first = &fiber;
    }
    if (first->awaited.kind >= WAIT_MBARRIER) {
        const Fiber& fiber = *first;
        char what[512] = "";
        describe(fiber, false, what, sizeof what);
        fault(fiber, fiber.wait.line, "deadlock: %s, and no thread can run.%s\n  Look for %s.", what, groups,
              fiber.awaited.kind == WAIT_MBARRIER
                  ? "a wrong parity, an arrival that is missing, or bytes announced and "
                    "never copied"
              : fiber.awaited.kind == WAIT_NAMED ? "an arrival that is missing, or a wrong number of threads"
                                                 : "a warpgroup that keeps the registers it should give back");
    }

    const bool barrier = block.at_barrier != 0;
    const Fiber* waiting = block.first_at_barrier;
    for (u32 i = 0; i < threads && !barrier; i++) {
        waiting = &block.fibers[i];
        if (!waiting->exited) break;
    }

    u32 begin = 0, end = threads;
    if (!barrier) {
        const u32 span = waiting->awaited.kind == WAIT_GROUP ? GROUP_THREADS : LANES;
        begin = thread_of(*waiting) / span * span;
        end = begin + span;
    }
    const Fiber* missing = nullptr;
    u32 n_missing = 0;
    for (u32 i = begin; i < end; i++) {
        const Fiber& fiber = block.fibers[i];
        if (waits_with(fiber, *waiting) || (!barrier && !(waiting->wait.mask >> fiber.lane & 1))) continue;
        if (!missing) missing = &fiber;
        n_missing++;
    }
    if (!missing) missing = waiting;

    char who[256] = "";
    append(who, sizeof who, "warp %u, lane %u ", missing->warp->index, missing->lane);
    describe(*missing, false, who, sizeof who);
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

// Copies of the engine land as late as can be, when nobody can run without them; with a seed, now and then before.
__attribute__((noinline)) static Fiber* let_copies_land(Block& block, u32 warp, u32 lane, Fiber* next) {
    if (block.land && block.launch->seed && draw(block) % 16 == 0) block.land(block);
    while (!next && block.running) {
        if (!block.land || !block.land(block)) deadlock(block);
        next = choose(block, warp, lane);
    }
    return next;
}

// Gives way until somebody makes this fiber ready again.
static void suspend(Fiber& self) {
    Block& block = *self.block;
    Warp& warp = *self.warp;
    warp.ready &= ~(1u << self.lane);
    if (!warp.ready) block.ready_warps &= ~(1u << warp.index);
    Fiber* next = choose(block, warp.index, self.lane + 1);
    if (__builtin_expect(!next || block.land, 0)) next = let_copies_land(block, warp.index, self.lane + 1, next);
    switch_to(self, next);
}

static void fiber_main() {
    Fiber& self = *current;
    if (!_setjmp(self.context)) setcontext(&self.block->boot);
    for (;;) {  // one round a block
        self.block->launch->kernel(self.block->launch->params);
        if (self.block->leave) self.block->leave(self);
        self.exited = true;
        if (!--self.block->running && self.block->finish) self.block->finish(self);
        suspend(self);
    }
}

// ---- Order in pipelined blocks ----

// The clocks of a thread, in this order: of each warp, for all its lanes; of the elected lane of each warp; of the
// copies from shared memory that each warp issued; of the tensor cores of each warpgroup; of the copies that each
// mbarrier counts. Ticks of all barriers come from one count, so clocks of earlier blocks say nothing about this one.
static inline u32 elected_clock(const Block& block, u32 warp) { return block.n_warps + warp; }
static inline u32 store_clock(const Block& block, u32 warp) { return 2 * block.n_warps + warp; }
static inline u32 group_clock(const Block& block, u32 group) { return 3 * block.n_warps + group; }
static inline u32 mbarrier_clock(const Block& block, u32 mbarrier) {
    return 3 * block.n_warps + block.n_groups + mbarrier;
}

// Zeroed memory that lives as long as the block's OS thread works on the launch.
static void* own(Block& block, size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED || block.n_owned == sizeof block.owned / sizeof *block.owned)
        fault(*current, 0, "out of memory on the host");
    block.owned[block.n_owned++] = {memory, bytes};
    return memory;
}

__attribute__((noinline, cold)) static void start_pipelined(Block& block) {
    block.pipelined = true;
    block.outdated = 0;
    if (block.scratch) return;
    block.max_clocks = mbarrier_clock(block, MAX_MBARRIERS);
    const size_t vectors = block.launch->threads + 2 * (MAX_MBARRIERS + NAMED_BARRIERS) + 1;
    block.clocks_bytes = vectors * block.max_clocks * sizeof(u32);
    u32* clocks = block.all_clocks = (u32*)own(block, block.clocks_bytes);
    auto next = [&] {
        u32* mine = clocks;
        clocks += block.max_clocks;
        return mine;
    };
    for (u32 i = 0; i < block.launch->threads; i++) block.fibers[i].clocks = next();
    block.scratch = next();
    block.mbarriers = (Mbarrier*)own(block, MAX_MBARRIERS * sizeof(Mbarrier));
    for (u32 i = 0; i < MAX_MBARRIERS; i++) {
        block.mbarriers[i].sync.arriving = next();
        block.mbarriers[i].sync.completed = next();
    }
    block.named = (NamedBarrier*)own(block, NAMED_BARRIERS * sizeof(NamedBarrier));
    for (u32 i = 0; i < NAMED_BARRIERS; i++) {
        block.named[i].sync.arriving = next();
        block.named[i].sync.completed = next();
    }
}

static size_t unit_readers_bytes(const Block& block) {
    return (block.launch->shared_bytes / 16 + 1) * (block.n_groups + 1) * sizeof(UnitReader);
}

static inline void need_pipelined(Block& block) {
    if (__builtin_expect(!block.pipelined, 0)) start_pipelined(block);
}

static inline void raise_to(u32& clock, u32 tick) { clock = clock > tick ? clock : tick; }

static inline void join(const Block& block, u32* to, const u32* from) {
    for (u32 i = 0; i < block.n_clocks; i++) raise_to(to[i], from[i]);
}

// What `self` did, and what it knows, goes with its arrival.
static void release(const Fiber& self, Sync& sync) {
    Block& block = *self.block;
    Warp& warp = *self.warp;
    join(block, sync.arriving, self.clocks);
    raise_to(sync.arriving[warp.index], warp.ordered);
    const u32 tick = ++block.tick;
    if (warp.elected == LANES) warp.elected = self.lane;
    sync.arrived[warp.index] |= 1u << self.lane;
    sync.last[warp.index] = tick;
    if (self.lane == warp.elected) sync.elected[warp.index] = tick;
}

// All have arrived. Where all lanes of a warp did, all that the warp did comes with them. A lane that arrives alone
// brings what it did itself; if it is not the elected one, its whole warp: that may miss a race, but invents none.
static void complete(Block& block, Sync& sync) {
    for (u32 i = 0; i < block.n_warps; i++) {
        const u32 lanes = sync.arrived[i];
        sync.previous[i] = lanes ? sync.last[i] : 0;
        if (!lanes) continue;
        if (sync.elected[i]) raise_to(sync.arriving[elected_clock(block, i)], sync.elected[i]);
        if (lanes == ALL_LANES || lanes != 1u << block.warps[i].elected) raise_to(sync.arriving[i], sync.last[i]);
        sync.arrived[i] = sync.elected[i] = 0;
    }
    join(block, sync.completed, sync.arriving);
}

// A warp of the phase before whose arrival is not ordered before one that `self` makes now, so that in another order of
// events this one would count for that phase; n_warps: none.
static u32 unordered_arrival(const Fiber& self, const Sync& sync) {
    const Block& block = *self.block;
    for (u32 i = 0; i < block.n_warps; i++) {
        const u32 tick = sync.previous[i];
        if (tick < block.ordered || i == self.warp->index) continue;
        if (self.clocks[i] < tick && self.clocks[elected_clock(block, i)] < tick) return i;
    }
    return block.n_warps;
}

static inline void acquire(Fiber& self, const Sync& sync) { join(*self.block, self.clocks, sync.completed); }

// After a barrier of these threads all know what any of them knew.
static void share_clocks(Block& block, u32 first, u32 end) {
    memset(block.scratch, 0, block.n_clocks * sizeof(u32));
    for (u32 i = first; i < end; i++) join(block, block.scratch, block.fibers[i].clocks);
    for (u32 i = first; i < end; i++) memcpy(block.fibers[i].clocks, block.scratch, block.n_clocks * sizeof(u32));
}

static inline void stop_waiting(Fiber& fiber) {
    fiber.wait.at = nullptr;
    fiber.awaited = {WAIT_WARP_OR_BLOCK, 0, 0};
}

// Lets all fibers go on that wait for this object.
static void wake(Block& block, WaitKind kind, u32 object) {
    for (u32 i = 0; i < block.launch->threads; i++) {
        Fiber& fiber = block.fibers[i];
        if (fiber.awaited.kind != kind || fiber.awaited.object != object) continue;
        stop_waiting(fiber);
        make_ready(block, *fiber.warp, 1u << fiber.lane);
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
static void order_warp(Warp& warp, u32, int) {
    Block& block = *warp.lanes->block;
    warp.ordered = ++block.tick;
    if (block.pipelined) share_clocks(block, warp.index * LANES, (warp.index + 1) * LANES);
}

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

// Waits for all threads of the warpgroup; the last to arrive runs compute(group, line) for all, and true goes on, false
// leaves them waiting for somebody to wake them.
__attribute__((noinline)) static void group_collective(const char* name, void* operands, int line,
                                                       bool (*compute)(Block&, u32 group, int line)) {
    Fiber& self = *current;
    Block& block = *self.block;
    Warp& warp = *self.warp;
    const u32 index = warp.index / GROUP_WARPS;
    Group& group = block.groups[index];
    if (index * GROUP_WARPS + GROUP_WARPS > block.n_warps)
        fault(self, line, "%s needs a whole warpgroup, four warps; the block ends within this one.", name);
    self.wait = {name, line, ALL_LANES};
    self.awaited = {WAIT_GROUP, 0, 0};
    self.operands = operands;
    warp.waiting |= 1u << self.lane;
    if (!group.arrived++) group.first = &self;
    const bool whole_warp = warp.waiting == ALL_LANES;
    for (u32 lane = 0; whole_warp && lane < LANES; lane++) {
        const Fiber& other = warp.lanes[lane];
        if (other.wait.line != line || other.wait.at != name)
            fault(self, line,
                  "divergence: this lane is at %s, line %d, while lane %u waits at %s, line %d. A warp's lanes must "
                  "reach the same call.\n  Look for a branch whose condition differs within the warp.",
                  name, line, lane, other.wait.at, other.wait.line);
    }
    const Fiber& first = *group.first;
    if (first.wait.line != line || first.wait.at != name)
        fault(self, line,
              "divergence: this thread is at %s, line %d, while warp %u, lane %u of its warpgroup waits at %s, line "
              "%d. All four warps must reach the same call.\n  Look for a branch whose condition differs within the "
              "warpgroup.",
              name, line, first.warp->index, first.lane, first.wait.at, first.wait.line);
    if (group.arrived < GROUP_THREADS) return suspend(self);
    group.arrived = 0;
    for (u32 i = index * GROUP_WARPS; i < (index + 1) * GROUP_WARPS; i++) block.warps[i].waiting = 0;
    if (!compute(block, index, line)) return suspend(self);
    for (u32 i = index * GROUP_WARPS; i < (index + 1) * GROUP_WARPS; i++) {
        for (u32 lane = 0; lane < LANES; lane++) stop_waiting(block.warps[i].lanes[lane]);
        make_ready(block, block.warps[i], ALL_LANES);
    }
    switch_to(self, choose(block, index * GROUP_WARPS, 0));
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
    block.outdated = block.pipelined ? 0 : block.ordered;
    if (block.pipelined) share_clocks(block, 0, block.launch->threads);
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

namespace emu {

template <class T>
static T exchange(const char* name, u32 mask, T value, u32 source, int line) {
    static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
    Shuffle mine = {0, source};
    memcpy(&mine.value, &value, 4);
    collective(name, mask, &mine, line, shuffle);
    memcpy(&value, &mine.value, 4);
    return value;
}

}  // namespace emu

template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int line = __builtin_LINE()) {
    return emu::exchange("__shfl_xor_sync", mask, value, emu::current->lane ^ (unsigned)lane_mask, line);
}

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
    return emu::exchange("__shfl_sync", mask, value, (unsigned)lane % emu::LANES, line);
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
