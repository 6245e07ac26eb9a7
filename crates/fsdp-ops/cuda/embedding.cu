// Rows of a table by index, and the gradient of the table.
//
// The gradient adds up the rows of `grad` that have the same index, in the order of rows, in f32
// for half types. First `embedding_sort` sorts the indices; it keeps equal ones in order. Then
// `embedding_sums` adds up CHUNK sorted rows at a time, and `embedding_finish` adds up the parts of
// a sum that is longer than that. Rows of the table that have no index are not written: fill
// `dweight` with zeros first.
//
// Launch: `embedding_forward` like softmax (`for_rows`), but with blocks of any n x m threads;
// `embedding_sort` with one block of 1024; `embedding_sums` and `embedding_finish` with `ceil(rows
// / 32)` blocks of any n threads.
#include "common.cuh"

/// Makes indices of 64 bits those of 32 bits that all kernels read. What does not fit becomes the
/// largest number, which is no index of anything. Launch: by elements (`for_elements`).
KERNEL(narrow_indices, const int64_t* indices, uint32_t* narrowed, int64_t count) {
    constexpr int64_t NONE = 0xffffffff;
    for_elements<1>(count, false, [&](int64_t at, auto) {
        int64_t index = indices[at];
        narrowed[at] = uint32_t(index < 0 || index > NONE ? NONE : index);
    });
}

/// Copies the row of each index. The row of an index that is too large is NaN.
template <int N, class T>
DEVICE void embedding_forward(const T* weight, const uint32_t* ids, T* y, int64_t rows, int table_rows,
                              int width) {
    for_rows(rows, [&](int64_t row) {
        uint32_t id = ids[row];
        bool exists = id < uint32_t(table_rows);
        for_columns<N>(width, [&](int column) {
            Values<N> values;
            if (exists)
                values = load<N>(weight + int64_t(id) * width + column);
            else
                for (int i = 0; i < N; ++i) values[i] = NAN;
            store<N>(y + row * width + column, values);
        });
    });
}

// --- Sorting ---

constexpr int SORT_THREADS = 1024, SORT_WARPS = SORT_THREADS / 32, DIGITS = 256;

/// Calls `f(position, key, digit, before, peers)` for the keys of a warp, 32 at a time. `key` is at
/// most `limit`, and `digit` is its 8 bits from `shift` on, or `DIGITS` for a thread without a key.
/// Of the threads with the same digit, `before` come before this one, and there are `peers` in all.
template <class F>
DEVICE void for_digits(const uint32_t* keys, int64_t begin, int64_t end, int shift, uint32_t limit,
                       F f) {
    constexpr int AHEAD = 4;
    unsigned lane = threadIdx.x % 32;
    for (int64_t base = begin; base < end; base += 32 * AHEAD) {
        uint32_t ahead[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            int64_t at = base + 32 * i + lane;
            ahead[i] = at < end ? min(keys[at], limit) : 0;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            int64_t at = base + 32 * i + lane;
            unsigned digit = at < end ? ahead[i] >> shift & (DIGITS - 1) : DIGITS;
            unsigned peers = __match_any_sync(0xffffffffu, digit);
            f(at, ahead[i], digit, __popc(peers & ((1u << lane) - 1)), __popc(peers));
        }
    }
}

/// Sorts indices, in `sorted`, and the numbers of their rows, in `order`, by passes over digits of
/// 8 bits. An index that is too large counts as `table_rows`. `scratch` has room for two numbers for
/// each row.
BOUNDED_KERNEL((SORT_THREADS), embedding_sort, const uint32_t* ids, uint32_t* sorted,
               uint32_t* order, uint32_t* scratch, int64_t rows, int table_rows) {
    // Of each warp and digit: how many keys, and then where the next one goes.
    __shared__ uint32_t counts[SORT_WARPS][DIGITS];
    __shared__ uint32_t totals[DIGITS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, digit_of_thread = threadIdx.x;
    int64_t share = (rows + SORT_THREADS - 1) / SORT_THREADS * 32;
    int64_t begin = min(rows, warp * share), end = min(rows, begin + share);
    int passes = 1;
    while (passes < 4 && uint32_t(table_rows) >> (8 * passes)) ++passes;
    for (int pass = 0; pass < passes; ++pass) {
        // Passes write to the result and to `scratch` in turn, the last one to the result.
        bool to_result = (passes - pass) % 2 == 1;
        const uint32_t* keys = pass == 0 ? ids : to_result ? scratch : sorted;
        const uint32_t* numbers = to_result ? scratch + rows : order;
        uint32_t* to_keys = to_result ? sorted : scratch;
        uint32_t* to_numbers = to_result ? order : scratch + rows;
        for (int digit = lane; digit < DIGITS; digit += 32) counts[warp][digit] = 0;
        __syncwarp();
        for_digits(keys, begin, end, 8 * pass, table_rows,
                   [&](int64_t, uint32_t, unsigned digit, int before, int peers) {
                       if (digit < DIGITS && before == 0) counts[warp][digit] += peers;
                       __syncwarp();
                   });
        __syncthreads();
        // Smaller digits come first, and of the same digit what earlier warps have.
        uint32_t own = 0, sum = 0;
        if (digit_of_thread < DIGITS) {
            for (int w = 0; w < SORT_WARPS; ++w) own += counts[w][digit_of_thread];
            totals[digit_of_thread] = sum = own;
        }
        __syncthreads();
        for (int distance = 1; distance < DIGITS; distance *= 2) {
            if (digit_of_thread < DIGITS && digit_of_thread >= distance)
                sum += totals[digit_of_thread - distance];
            __syncthreads();
            if (digit_of_thread < DIGITS) totals[digit_of_thread] = sum;
            __syncthreads();
        }
        if (digit_of_thread < DIGITS) {
            uint32_t next = sum - own;
            for (int w = 0; w < SORT_WARPS; ++w) {
                uint32_t count = counts[w][digit_of_thread];
                counts[w][digit_of_thread] = next;
                next += count;
            }
        }
        __syncthreads();
        for_digits(keys, begin, end, 8 * pass, table_rows,
                   [&](int64_t at, uint32_t key, unsigned digit, int before, int peers) {
                       uint32_t to = digit < DIGITS ? counts[warp][digit] + before : 0;
                       __syncwarp();
                       if (digit < DIGITS) {
                           to_keys[to] = key;
                           to_numbers[to] = pass == 0 ? uint32_t(at) : numbers[at];
                           if (before == 0) counts[warp][digit] += peers;
                       }
                       __syncwarp();
                   });
        __syncthreads();
    }
}

// --- Sums ---

/// The number of sorted rows that a block adds up.
constexpr int CHUNK = 32;

/// Adds up rows with the same index. A sum that has all of its rows in this chunk is written to the
/// table. The part of one that began in an earlier chunk goes to the first of the chunk's two rows
/// of partials, and the part of one that begins here and goes on in the next chunk to the second.
/// `partials` is `[ceil(rows / 32), 2, width]`.
template <int N, class T>
DEVICE void embedding_sums(const T* grad, const uint32_t* sorted, const uint32_t* order, T* dweight,
                           float* partials, int64_t rows, int table_rows, int width) {
    constexpr int AHEAD = 8;
    int64_t start = int64_t(blockIdx.x) * CHUNK;
    int count = int(min(int64_t(CHUNK), rows - start));
    for_columns<N>(width, [&](int column) {
        bool from_before = start > 0 && sorted[start - 1] == sorted[start];
        Values<N> total = {};
        for (int base = 0; base < count; base += AHEAD) {
            Values<N> ahead[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (base + i < count)
                    ahead[i] = load<N>(grad + int64_t(order[start + base + i]) * width + column);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (base + i >= count) continue;
                int64_t at = start + base + i;
#pragma unroll
                for (int j = 0; j < N; ++j) total[j] += ahead[i][j];
                uint32_t id = sorted[at];
                bool goes_on = at + 1 < rows && sorted[at + 1] == id;
                if (goes_on && base + i + 1 < count) continue;
                if (from_before || goes_on) {
                    float* part =
                        partials + (2 * int64_t(blockIdx.x) + !from_before) * width + column;
#pragma unroll
                    for (int j = 0; j < N; ++j) part[j] = total[j];
                } else if (id < uint32_t(table_rows)) {
                    store<N>(dweight + int64_t(id) * width + column, total);
                }
                from_before = false;
#pragma unroll
                for (int j = 0; j < N; ++j) total[j] = 0;
            }
        }
    });
}

/// Adds up the parts of a sum that begins in this block's chunk and goes on in the next.
template <class T>
DEVICE void embedding_finish(const uint32_t* sorted, const float* partials, T* dweight,
                             int64_t rows, int table_rows, int width) {
    int64_t chunk = blockIdx.x, start = chunk * CHUNK, next = start + CHUNK;
    if (next >= rows || sorted[next - 1] != sorted[next]) return;
    uint32_t id = sorted[next];
    if (id >= uint32_t(table_rows) || (start > 0 && sorted[start - 1] == id)) return;
    // The first chunk after this one that does not begin with the index.
    int64_t low = chunk + 1, high = (rows + CHUNK - 1) / CHUNK;
    while (low + 1 < high) {
        int64_t middle = (low + high) / 2;
        if (sorted[middle * CHUNK] == id)
            low = middle;
        else
            high = middle;
    }
    int64_t end = low + 1;
    for_columns<1>(width, [&](int column) {
        float total = partials[(2 * chunk + 1) * width + column];
#pragma unroll 8
        for (int64_t part = chunk + 1; part < end; ++part)
            total += partials[2 * part * width + column];
        dweight[int64_t(id) * width + column] = narrow<T>(total);
    });
}

#define EMBEDDING(T)                                                                               \
    KERNEL(embedding_forward_##T, const T* weight, const uint32_t* ids, T* y, int64_t rows,        \
           int table_rows, int width) {                                                               \
        BY_PACKS(packs_fit(width, weight, y), embedding_forward, T, weight, ids, y, rows, table_rows, \
                 width);                                                                           \
    }                                                                                              \
    KERNEL(embedding_sums_##T, const T* grad, const uint32_t* sorted, const uint32_t* order,       \
           T* dweight, float* partials, int64_t rows, int table_rows, int width) {                    \
        BY_PACKS(packs_fit(width, grad, dweight), embedding_sums, T, grad, sorted, order, dweight, \
                 partials, rows, table_rows, width);                                                  \
    }                                                                                              \
    KERNEL(embedding_finish_##T, const uint32_t* sorted, const float* partials, T* dweight,        \
           int64_t rows, int table_rows, int width) {                                                 \
        embedding_finish(sorted, partials, dweight, rows, table_rows, width);                         \
    }
FOR_FLOATS(EMBEDDING)
