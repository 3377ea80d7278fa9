// Turns of blocks (PTX ISA, "ld.acquire", "red.release"). Blocks begin in the order of their numbers, and one that
// waits holds its OS thread: so it must wait for those before it only.

#include <sched.h>
#include <time.h>

namespace emu {

constexpr long TURN_SECONDS = 60;  // more than all blocks together take

static void await_turn(Fiber& self, const u32* number, u32 turn, int line) {
    check_global(self, number, 4, false, line);
    timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    while (__atomic_load_n(number, __ATOMIC_ACQUIRE) != turn) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        const Block& block = *self.block;
        if (__atomic_load_n(&block.launch->fault_block, __ATOMIC_RELAXED) < block.index.x ||
            now.tv_sec - begin.tv_sec > TURN_SECONDS)
            fault(self, line,
                  "deadlock: turn_await: waits for turn %u of a number that is %u.\n  Look for a block before this one "
                  "that does not pass its turn on, or for a wait for a block after this one.",
                  turn, __atomic_load_n(number, __ATOMIC_RELAXED));
        sched_yield();
    }
}

}  // namespace emu

static inline void turn_await(const u32* number, u32 turn, int line = __builtin_LINE()) {
    emu::await_turn(*emu::current, number, turn, line);
}

static inline void turn_pass(u32* number, int line = __builtin_LINE()) {
    emu::check_global(*emu::current, number, 4, true, line);
    __atomic_fetch_add(number, 1, __ATOMIC_RELEASE);
}

static inline void fence_proxy_async_global() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
