// Register budgets (PTX ISA, "setmaxnreg") and barriers of a part of the block ("barrier.sync", "barrier.arrive").

namespace emu {

struct Budget {
    u32 registers;
    bool more;
};

// What all warpgroups hold together, of what the launch gave them.
static u32 registers_taken(const Block& block) {
    u32 taken = 0;
    for (u32 i = 0; i < block.n_groups; i++) taken += block.groups[i].registers;
    return taken;
}

static u32 registers_given(const Block& block) {
    const u32 each = REGISTER_FILE / block.launch->threads / 8 * 8;
    return block.n_groups * (each < 248 ? each : 248);
}

static bool take_registers(Block& block, Group& group) {
    if (registers_taken(block) - group.registers + group.wanted > registers_given(block)) return false;
    group.registers = group.wanted;
    group.wanted = 0;
    return true;
}

static bool budget_registers(Block& block, u32 index, int line) {
    Fiber& self = *current;
    Group& group = block.groups[index];
    const Budget budget = *(const Budget*)self.operands;
    if (budget.more ? budget.registers < group.registers : budget.registers > group.registers)
        fault(self, line,
              "setmaxnreg_%s to %u registers a thread, and the warpgroup has %u (a block of %u threads starts with %u "
              "here).",
              budget.more ? "inc" : "dec", budget.registers, group.registers, block.launch->threads,
              registers_given(block) / block.n_groups);
    if (budget.more) {
        group.wanted = budget.registers;
        if (take_registers(block, group)) return true;
        for (u32 i = index * GROUP_THREADS; i < (index + 1) * GROUP_THREADS; i++) {
            Fiber& fiber = block.fibers[i];
            fiber.wait = {"setmaxnreg_inc", line, 0};
            fiber.awaited = {WAIT_REGISTERS, budget.registers, index};
            fiber.warp->ready &= ~(1u << fiber.lane);
        }
        return false;
    }
    group.registers = budget.registers;
    for (u32 i = 0; i < block.n_groups; i++) {
        if (!block.groups[i].wanted || !take_registers(block, block.groups[i])) continue;
        for (u32 thread = i * GROUP_THREADS; thread < (i + 1) * GROUP_THREADS; thread++) {
            Fiber& fiber = block.fibers[thread];
            stop_waiting(fiber);
            make_ready(block, *fiber.warp, 1u << fiber.lane);
        }
    }
    return true;
}

struct Arrival {
    u32 id, threads;
    u32 generation;  // of the barrier when the warp arrived
    const char* name;
};

// A warp arrives, whole.
static void arrive_named(Warp& warp, u32, int line) {
    Fiber& self = *warp.lanes;
    Block& block = *self.block;
    need_pipelined(block);
    const Arrival arrival = *(const Arrival*)self.operands;
    const u32 id = arrival.id, threads = arrival.threads;
    for (u32 lane = 1; lane < LANES; lane++) {
        const Arrival& other = *(const Arrival*)warp.lanes[lane].operands;
        if (other.id != id || other.threads != threads)
            fault(warp.lanes[lane], line, "%s: the lanes of the warp name different barriers or numbers of threads.",
                  arrival.name);
    }
    if (id == 0 || id >= NAMED_BARRIERS)
        fault(self, line, "%s with barrier %u; it must be from 1 to %u (0 is that of __syncthreads).", arrival.name, id,
              NAMED_BARRIERS - 1);
    if (threads == 0 || threads % LANES || threads > block.launch->threads)
        fault(self, line, "%s of %u threads with barrier %u; it must be whole warps of the block's %u threads.",
              arrival.name, threads, id, block.launch->threads);
    NamedBarrier& barrier = block.named[id];
    if (!barrier.arrived) {
        barrier.expected = threads;
        barrier.first = thread_of(self);
        barrier.first_line = line;
    }
    if (barrier.expected != threads)
        fault(
            self, line,
            "%s of %u threads with barrier %u, for which warp %u arrived at line %d as one of %u.\n  Look for a wrong "
            "number of threads, or two uses of one barrier at a time.",
            arrival.name, threads, id, barrier.first / LANES, barrier.first_line, barrier.expected);
    if (barrier.sync.arrived[warp.index])
        fault(self, line,
              "%s: this warp arrives at barrier %u again, before the %u threads that it expects have come: %u have.\n  "
              "Look for a missing named_barrier_sync of the others in between.",
              arrival.name, id, barrier.expected, barrier.arrived);
    const u32 before = unordered_arrival(self, barrier.sync);
    if (before != block.n_warps)
        fault(self, line,
              "race: %s with barrier %u, not knowing of the arrival of warp %u before the barrier last completed: in "
              "another order it would count with that.\n  Look for a barrier used for two purposes, or an arrival with "
              "no named_barrier_sync of this warp since its last.",
              arrival.name, id, before);
    for (u32 lane = 0; lane < LANES; lane++) {
        ((Arrival*)warp.lanes[lane].operands)->generation = barrier.generation;
        release(warp.lanes[lane], barrier.sync);
    }
    barrier.arrived += LANES;
    if (barrier.arrived < threads) return;
    barrier.arrived = 0;
    barrier.generation++;
    complete(block, barrier.sync);
    wake(block, WAIT_NAMED, id);
}

static void sync_named(Fiber& self, u32 id, u32 threads, int line) {
    if (id == 0 && threads == self.block->launch->threads) return block_barrier(line);
    Arrival arrival = {id, threads, 0, "named_barrier_sync"};
    collective(arrival.name, ALL_LANES, &arrival, line, arrive_named);
    const NamedBarrier& barrier = self.block->named[id];
    if (barrier.generation == arrival.generation) {
        self.wait = {arrival.name, line, 0};
        self.awaited = {WAIT_NAMED, id, 0};
        suspend(self);
    }
    acquire(self, barrier.sync);
}

}  // namespace emu

template <int N>
static inline void setmaxnreg_inc(int line = __builtin_LINE()) {
    static_assert(24 <= N && N <= 256 && N % 8 == 0, "24 to 256 registers, a multiple of 8");
    emu::Budget budget = {N, true};
    emu::group_collective("setmaxnreg_inc", &budget, line, emu::budget_registers);
}

template <int N>
static inline void setmaxnreg_dec(int line = __builtin_LINE()) {
    static_assert(24 <= N && N <= 256 && N % 8 == 0, "24 to 256 registers, a multiple of 8");
    emu::Budget budget = {N, false};
    emu::group_collective("setmaxnreg_dec", &budget, line, emu::budget_registers);
}

static inline int kept(int x) { return x; }

static inline void named_barrier_sync(u32 id, u32 threads, int line = __builtin_LINE()) {
    emu::sync_named(*emu::current, id, threads, line);
}

static inline void named_barrier_arrive(u32 id, u32 threads, int line = __builtin_LINE()) {
    emu::Arrival arrival = {id, threads, 0, "named_barrier_arrive"};
    emu::collective(arrival.name, emu::ALL_LANES, &arrival, line, emu::arrive_named);
}
