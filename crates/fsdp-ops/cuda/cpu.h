// Runs the kernels on the CPU, for tests: a C++ compiler compiles the same sources with this header
// to a shared library, which has a function of each kernel's name that binds its arguments.
//
// Each thread of a block is a fiber with a stack of its own, and blocks run one after the other. A
// fiber runs until it waits for others, at a barrier or in a warp operation, so shared memory that
// is read without a barrier in between mostly has the wrong content, as it may on a GPU. Copies
// that `cp.async` starts are made as late as they may be: when they are waited for. Threads that
// wait for each other forever end the process with a message.
//
// It does not show: races that are harmless in the order in which fibers run; reads outside of
// memory; launches with too many registers or bytes of shared memory; the exact bits of
// exponentials and of tensor cores; speed. Warp operations need all threads of a warp: masks are
// ignored.
#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define DYNAMIC_SHARED(NAME) void* NAME = cpu::dynamic_shared_memory()

// Defines a kernel, and the function that a test finds by the kernel's name: it takes addresses of
// the kernel's arguments, as a launch does, and returns what `launch_on_cpu` takes.
#define KERNEL(NAME, ...)                                                    \
    namespace kernels {                                                      \
    static void NAME(__VA_ARGS__);                                           \
    }                                                                        \
    extern "C" cpu::Body* NAME(void** arguments, cpu::Translate translate) { \
        return cpu::bound(kernels::NAME, arguments, translate);              \
    }                                                                        \
    void kernels::NAME(__VA_ARGS__)
#define BOUNDED_KERNEL(BOUNDS, NAME, ...) KERNEL(NAME, __VA_ARGS__)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) uint2 {
    uint32_t x, y;
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cpu {

/// Threads that wait until all of them have arrived.
struct Barrier {
    unsigned members = 0, arrived = 0, round = 0;
};

/// Memory through which the threads of a warp give each other operands.
struct Warp {
    Barrier barrier;
    alignas(16) unsigned char slots[32][64];
};

/// A copy from global to shared memory that has been started.
struct Copy {
    void* to;
    const void* from;
    int bytes, zeros;
    unsigned group;
};

constexpr size_t STACK = 1 << 17;
/// Bytes that are checked after the end of dynamic shared memory.
constexpr size_t GUARD = 1 << 12;

struct Fiber {
    ucontext_t context;
    /// Where it goes on. A jump, unlike a switch of contexts, needs no system call.
    jmp_buf resume;
    std::unique_ptr<char[]> stack{new char[STACK]};
    dim3 index;
    unsigned lane = 0, group = 0;
    Warp* warp = nullptr;
    bool started = false, done = false;
    std::vector<Copy> copies;
};

inline jmp_buf scheduler;
inline Fiber* current;
inline Barrier block_barrier;
inline std::function<void()> kernel;
inline std::vector<unsigned char> dynamic_shared;
/// Counts barriers passed and threads ended: if it stands still, no thread can go on.
inline unsigned long progress;

inline void yield() {
    if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

/// Lets a fiber run until it yields.
inline void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx = fiber.index;
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

inline void wait(Barrier& barrier) {
    unsigned round = barrier.round;
    ++progress;
    if (++barrier.arrived == barrier.members) {
        barrier.arrived = 0;
        ++barrier.round;
    }
    while (barrier.round == round) yield();
}

inline void run_fiber() {
    kernel();
    if (!current->copies.empty()) {
        fprintf(stderr, "a kernel on the CPU: a thread ended without waiting for its copies\n");
        abort();
    }
    current->done = true;
    ++progress;
    yield();
}

inline void run_block(unsigned threads) {
    // Kept for the next block.
    static std::vector<Fiber> fibers(1024);
    static std::vector<Warp> warps(32);
    block_barrier = {threads, 0, 0};
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.index =
            dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
        fiber.lane = i % 32;
        fiber.warp = &warps[i / 32];
        fiber.warp->barrier = {threads - i / 32 * 32 < 32 ? threads % 32 : 32, 0, 0};
        fiber.started = fiber.done = false;
        fiber.group = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (unsigned left = threads; left > 0;) {
        unsigned long before = progress;
        for (unsigned i = 0; i < threads; ++i) {
            if (fibers[i].done) continue;
            resume(fibers[i]);
            left -= fibers[i].done;
        }
        if (progress == before) {
            fprintf(stderr,
                    "a kernel on the CPU: the threads of a block wait for each other forever\n");
            abort();
        }
    }
}

/// A kernel with its arguments.
using Body = std::function<void()>;
/// Returns the host's address of what has this address on the device.
using Translate = void* (*)(uint64_t);

/// Tells if a struct has a function that replaces the pointers in it.
template <class A, class = void> struct HoldsPointers : std::false_type {};
template <class A>
struct HoldsPointers<A, std::void_t<decltype(std::declval<A&>().translate(Translate()))>>
    : std::true_type {};

/// Returns an argument: as it is, or what a pointer to device memory means on the host.
template <class A> A argument(const void* from, Translate translate) {
    if constexpr (std::is_pointer_v<A>) {
        uint64_t address;
        memcpy(&address, from, sizeof(address));
        return static_cast<A>(translate(address));
    } else {
        A value;
        memcpy(&value, from, sizeof(value));
        if constexpr (HoldsPointers<A>::value) value.translate(translate);
        return value;
    }
}

template <class... A, size_t... I>
Body* bound(void (*kernel)(A...), void** arguments, Translate translate,
            std::index_sequence<I...>) {
    return new Body([kernel, values = std::tuple<A...>(argument<A>(arguments[I], translate)...)] {
        std::apply(kernel, values);
    });
}

template <class... A> Body* bound(void (*kernel)(A...), void** arguments, Translate translate) {
    return bound(kernel, arguments, translate, std::index_sequence_for<A...>());
}

inline void* dynamic_shared_memory() {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(dynamic_shared.data()) + 15) / 16 *
                                   16);
}

/// Ends the process unless an address is a multiple of 16, as accesses of 16 bytes need it.
inline void check_alignment(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16 == 0) return;
    fprintf(
        stderr,
        "a kernel on the CPU: 16 bytes are accessed at an address that is not a multiple of 16\n");
    abort();
}

/// Runs a kernel, as `kernel<<<grid, block, shared_bytes>>>(...)` does.
inline void launch(dim3 grid, dim3 block, size_t shared_bytes, const Body& body) {
    // Where a kernel is, and its shared memory, are global variables.
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    gridDim = grid;
    blockDim = block;
    kernel = body;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                // Shared memory has no initial values: NaN in every float type. What follows it
                // must stay as it is.
                dynamic_shared.assign(shared_bytes + 16 + GUARD, 0xff);
                run_block(block.x * block.y * block.z);
                auto* end = static_cast<unsigned char*>(dynamic_shared_memory()) + shared_bytes;
                if (std::any_of(end, end + GUARD,
                                [](unsigned char byte) { return byte != 0xff; })) {
                    fprintf(
                        stderr,
                        "a kernel on the CPU: a kernel wrote after the end of its shared memory\n");
                    abort();
                }
            }
}

/// Gives `mine` to the warp, lets `f` read what others gave, and returns what `f` does.
template <class V, class F> auto exchange(const V& mine, F f) {
    static_assert(sizeof(V) <= 64, "larger than a slot");
    Warp& warp = *current->warp;
    memcpy(warp.slots[current->lane], &mine, sizeof(V));
    wait(warp.barrier);
    auto result =
        f([&](unsigned lane) -> const V& { return *reinterpret_cast<const V*>(warp.slots[lane]); });
    wait(warp.barrier);
    return result;
}

} // namespace cpu

/// Runs a kernel with its arguments, which are gone afterwards.
extern "C" void launch_on_cpu(cpu::Body* body, const unsigned* grid, const unsigned* block,
                              size_t shared_bytes) {
    cpu::launch(dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), shared_bytes,
                *body);
    delete body;
}

inline void __syncthreads() { cpu::wait(cpu::block_barrier); }
inline void __syncwarp() { cpu::wait(cpu::current->warp->barrier); }

template <class V> V __shfl_xor_sync(unsigned, V value, int mask) {
    return cpu::exchange(value, [&](auto of) { return of(cpu::current->lane ^ mask); });
}

/// Returns a bit for each thread of the warp that gives the same value.
inline unsigned __match_any_sync(unsigned, unsigned value) {
    return cpu::exchange(value, [&](auto of) {
        unsigned same = 0, members = cpu::current->warp->barrier.members;
        for (unsigned lane = 0; lane < members; ++lane) same |= unsigned(of(lane) == value) << lane;
        return same;
    });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

/// Stores a vector, "write back": what an assignment does.
template <class W> void __stwb(W* to, W words) {
    if constexpr (sizeof(W) == 16) cpu::check_alignment(to);
    *to = words;
}

// --- Half types ---

struct __nv_bfloat16 {
    uint16_t bits;
};

struct __half {
    _Float16 value;
};

inline float __bfloat162float(__nv_bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float __half2float(__half x) {
    // Most CPUs convert these numbers by a long function.
    static const std::vector<float> values = [] {
        std::vector<float> values(1 << 16);
        for (unsigned i = 0; i < values.size(); ++i) {
            uint16_t bits = uint16_t(i);
            __half half;
            memcpy(&half, &bits, sizeof(half));
            values[i] = half.value;
        }
        return values;
    }();
    uint16_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return values[bits];
}
inline __half __float2half_rn(float x) { return {_Float16(x)}; }

// --- Arithmetic ---

inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;
    return product;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::fma, std::fmaf, std::isfinite, std::isnan, std::min, std::max;

// --- The wrappers of tensor core and copy instructions in common.cuh ---

inline float exp2_approx(float x) { return std::exp2(x); }

inline void copy_async(void* to, const void* from, int bytes) {
    cpu::check_alignment(to), cpu::check_alignment(from);
    cpu::current->copies.push_back({to, from, bytes, 16 - bytes, cpu::current->group});
}

inline void commit_copies() { ++cpu::current->group; }

template <int PENDING> void wait_for_copies() {
    auto& copies = cpu::current->copies;
    size_t kept = 0;
    for (const cpu::Copy& copy : copies) {
        if (copy.group + PENDING >= cpu::current->group) {
            copies[kept++] = copy;
            continue;
        }
        memcpy(copy.to, copy.from, copy.bytes);
        memset(static_cast<char*>(copy.to) + copy.bytes, 0, copy.zeros);
    }
    copies.resize(kept);
}

namespace cpu {

template <bool TRANSPOSED> void load_matrices(uint32_t (&to)[4], const void* row) {
    unsigned lane = current->lane;
    auto element = [&](auto of, int matrix, int r, int c) {
        return static_cast<const uint16_t*>(of(matrix * 8 + r))[c];
    };
    check_alignment(row);
    exchange(row, [&](auto of) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            uint32_t halves[2];
            for (int i = 0; i < 2; ++i) {
                int r = lane / 4, c = lane % 4 * 2 + i;
                halves[i] = TRANSPOSED ? element(of, matrix, c, r) : element(of, matrix, r, c);
            }
            to[matrix] = halves[0] | halves[1] << 16;
        }
        return 0;
    });
}

template <class T> float half_of(uint32_t pair, int index) {
    uint16_t bits = pair >> (16 * index);
    T value;
    memcpy(&value, &bits, 2);
    if constexpr (std::is_same_v<T, __half>)
        return __half2float(value);
    else
        return __bfloat162float(value);
}

} // namespace cpu

inline void load_matrices(uint32_t (&to)[4], const void* row) {
    cpu::load_matrices<false>(to, row);
}
inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    cpu::load_matrices<true>(to, row);
}

template <class T> uint32_t pair_of(float low, float high) {
    uint16_t bits[2];
    auto bits_of = [](float value, uint16_t& to) {
        if constexpr (std::is_same_v<T, __half>) {
            __half half = __float2half_rn(value);
            memcpy(&to, &half, 2);
        } else {
            to = __float2bfloat16_rn(value).bits;
        }
    };
    bits_of(low, bits[0]);
    bits_of(high, bits[1]);
    return bits[0] | uint32_t(bits[1]) << 16;
}

template <class T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Operands {
        uint32_t a[4], b[2];
    } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    unsigned lane = cpu::current->lane;
    cpu::exchange(mine, [&](auto of) {
        // The two rows of the left matrix and the two columns of the right one that this thread has
        // products of.
        float left[2][16], right[2][16];
        for (int which = 0; which < 2; ++which)
            for (int k = 0; k < 16; ++k) {
                unsigned at = k / 8, pair = k % 8 / 2;
                const Operands& row = of(lane / 4 * 4 + pair);
                const Operands& column = of((lane % 4 * 2 + which) * 4 + pair);
                left[which][k] = cpu::half_of<T>(row.a[at * 2 + which], k % 2);
                right[which][k] = cpu::half_of<T>(column.b[at], k % 2);
            }
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 16; ++k) c[i] += left[i / 2][k] * right[i % 2][k];
        return 0;
    });
}
