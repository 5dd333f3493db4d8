// Gradient rows between ranks (EncodedRows in ops/layout.py): those that are bitwise zero stay at home, and what travels
// may be rounded to bfloat16.
//
// Both directions go over the rows in chunks twice: what is left of each chunk is counted first, so that its place among
// what is left of all chunks is known before it is copied.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../common/bfloat16.h"
#include "entry.h"
#include "parallel.h"
#include "specialise.h"

namespace bytesplat {
namespace {

constexpr int WORD = 32;          // rows of a word of the mask
constexpr int64_t CHUNK = 2048;   // rows, a multiple of WORD

struct Codec {
    const int64_t* parts;  // rows of each part
    int64_t part_count;
    const int32_t* columns;  // those that travel
    int column_count;
    int width;  // of a row
    int bfloat16;  // what travels is rounded to that
};

// Rows of one part that a thread handles in a row, and their words of the mask.
struct Chunk {
    int64_t part, first, last, word;
    int64_t left = 0;  // rows that are not zero

    int64_t words() const { return (last - first + WORD - 1) / WORD; }
};

std::vector<Chunk> chunks_of(const Codec& codec) {
    std::vector<Chunk> chunks;
    int64_t row = 0, word = 0;
    for (int64_t part = 0; part < codec.part_count; ++part) {
        const int64_t last = row + codec.parts[part];
        for (; row < last; row = chunks.back().last, word += chunks.back().words())
            chunks.push_back({part, row, std::min(row + CHUNK, last), word});
    }
    return chunks;
}

// Calls copy(chunk, place): `place` is that of its first row among all that are left.
template <class Copy> void copy_chunks(int threads, const std::vector<Chunk>& chunks, Copy copy) {
    std::vector<int64_t> places(chunks.size() + 1);
    for (size_t i = 0; i < chunks.size(); ++i) places[i + 1] = places[i] + chunks[i].left;
    parallel_for(threads, chunks.size(), 1, [&](int64_t i) { copy(chunks[i], places[i]); });
}

// Calls visit(row) for the rows of a chunk that are left.
template <class Visit> void visit_left(const Chunk& chunk, const uint32_t* mask, Visit visit) {
    for (int64_t w = 0; w < chunk.words(); ++w)
        for (uint32_t bits = mask[chunk.word + w]; bits != 0; bits &= bits - 1)
            visit(chunk.first + WORD * w + __builtin_ctz(bits));
}

bool is_zero(const Codec& codec, const float* row) {
    uint32_t bits = 0, column;
    for (int c = 0; c < codec.column_count; ++c) {
        std::memcpy(&column, row + codec.columns[c], sizeof(column));
        bits |= column;
    }
    return bits == 0;
}

// A number on its way.
void write(float value, float& to) { to = value; }
void read(float from, float& value) { value = from; }

void write(float value, uint16_t& to) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    to = bfloat16_of(bits);
}

void read(uint16_t from, float& value) {
    const uint32_t bits = float_of_bfloat16(from);
    std::memcpy(&value, &bits, sizeof(bits));
}

template <bool BFLOAT16> using Sent = std::conditional_t<BFLOAT16, uint16_t, float>;

}  // namespace
}  // namespace bytesplat

using namespace bytesplat;

// rows [M, width] to mask, to the first rows of left [M, column_count] and to counts [part_count].
extern "C" int64_t bytesplat_encode_rows(int threads, const Codec* codec, const float* rows, uint32_t* mask, void* left,
                                         int64_t* counts) try {
    std::vector<Chunk> chunks = chunks_of(*codec);
    parallel_for(threads, chunks.size(), 1, [&](int64_t i) {
        Chunk& chunk = chunks[i];
        std::fill_n(mask + chunk.word, chunk.words(), 0u);
        for (int64_t row = chunk.first; row < chunk.last; ++row) {
            if (is_zero(*codec, rows + codec->width * row)) continue;
            const int64_t bit = row - chunk.first;
            mask[chunk.word + bit / WORD] |= 1u << bit % WORD;
            ++chunk.left;
        }
    });
    std::fill_n(counts, codec->part_count, 0);
    for (const Chunk& chunk : chunks) counts[chunk.part] += chunk.left;
    specialise(
        [&](auto bfloat16) {
            copy_chunks(threads, chunks, [&](const Chunk& chunk, int64_t place) {
                auto* to = static_cast<Sent<bfloat16>*>(left) + codec->column_count * place;
                visit_left(chunk, mask, [&](int64_t row) {
                    for (int c = 0; c < codec->column_count; ++c)
                        write(rows[codec->width * row + codec->columns[c]], *to++);
                });
            });
        },
        codec->bfloat16 != 0);
    return 0;
} catch (...) {
    return bytesplat::failure();
}

// The reverse. Columns that did not travel become zero.
extern "C" int64_t bytesplat_decode_rows(int threads, const Codec* codec, const uint32_t* mask, const void* left,
                                         float* rows) try {
    std::vector<Chunk> chunks = chunks_of(*codec);
    for (Chunk& chunk : chunks)
        for (int64_t w = 0; w < chunk.words(); ++w) chunk.left += __builtin_popcount(mask[chunk.word + w]);
    specialise(
        [&](auto bfloat16) {
            copy_chunks(threads, chunks, [&](const Chunk& chunk, int64_t place) {
                std::fill(rows + codec->width * chunk.first, rows + codec->width * chunk.last, 0.0f);
                const auto* from = static_cast<const Sent<bfloat16>*>(left) + codec->column_count * place;
                visit_left(chunk, mask, [&](int64_t row) {
                    for (int c = 0; c < codec->column_count; ++c)
                        read(*from++, rows[codec->width * row + codec->columns[c]]);
                });
            });
        },
        codec->bfloat16 != 0);
    return 0;
} catch (...) {
    return bytesplat::failure();
}
