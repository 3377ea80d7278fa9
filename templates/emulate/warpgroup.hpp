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

static NamedBarrier& arrive_named(Fiber& self, const char* name, u32 id, u32 threads, int line) {
    Block& block = *self.block;
    need_pipelined(block);
    if (id == 0 || id >= NAMED_BARRIERS)
        fault(self, line, "%s with barrier %u; it must be from 1 to %u (0 is that of __syncthreads).", name, id,
              NAMED_BARRIERS - 1);
    if (threads == 0 || threads % LANES || threads > block.launch->threads)
        fault(self, line, "%s of %u threads with barrier %u; it must be whole warps of the block's %u threads.", name,
              threads, id, block.launch->threads);
    NamedBarrier& barrier = block.named[id];
    if (!barrier.arrived) {
        barrier.expected = threads;
        barrier.first = thread_of(self);
        barrier.first_line = line;
    }
    if (barrier.expected != threads)
        fault(self, line,
              "%s of %u threads with barrier %u, for which warp %u, lane %u arrived at line %d as one of %u.\n  Look "
              "for a wrong number of threads, or two uses of one barrier at a time.",
              name, threads, id, barrier.first / LANES, barrier.first % LANES, barrier.first_line, barrier.expected);
    if (barrier.sync.arrived[self.warp->index] >> self.lane & 1)
        fault(self, line,
              "%s: this thread arrives at barrier %u again, before the %u threads that it expects have come: %u have."
              "\n  Look for a missing named_barrier_sync of the others in between.",
              name, id, barrier.expected, barrier.arrived);
    release(self, barrier.sync);
    if (++barrier.arrived < threads) return barrier;
    for (u32 i = 0; i < block.n_warps; i++)
        if (barrier.sync.arrived[i] && barrier.sync.arrived[i] != ALL_LANES)
            fault(self, line,
                  "%s: barrier %u has its %u threads, but of warp %u only some (mask 0x%08x): warps must arrive "
                  "whole.\n  Look for a branch whose condition differs within the warp.",
                  name, id, threads, i, barrier.sync.arrived[i]);
    barrier.arrived = barrier.expected = 0;
    barrier.generation++;
    complete(block, barrier.sync);
    for (u32 i = 0; i < block.launch->threads; i++) {
        Fiber& fiber = block.fibers[i];
        if (fiber.awaited.kind == WAIT_NAMED && fiber.awaited.object == id) acquire(fiber, barrier.sync);
    }
    wake(block, WAIT_NAMED, id);
    return barrier;
}

static void sync_named(Fiber& self, u32 id, u32 threads, int line) {
    const Block& block = *self.block;
    if (id == 0 && threads == block.launch->threads) return block_barrier(line);
    need_pipelined(*self.block);
    const u32 generation = block.named[id % NAMED_BARRIERS].generation;
    const NamedBarrier& barrier = arrive_named(self, "named_barrier_sync", id, threads, line);
    if (barrier.generation != generation) return acquire(self, barrier.sync);
    self.wait = {"named_barrier_sync", line, 0};
    self.awaited = {WAIT_NAMED, id, 0};
    suspend(self);
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

static inline void named_barrier_sync(u32 id, u32 threads, int line = __builtin_LINE()) {
    emu::sync_named(*emu::current, id, threads, line);
}

static inline void named_barrier_arrive(u32 id, u32 threads, int line = __builtin_LINE()) {
    emu::arrive_named(*emu::current, "named_barrier_arrive", id, threads, line);
}
