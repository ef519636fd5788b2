// One step: the phases of every layer, put together once and run by the pool.
#include <algorithm>
#include <cstring>

#include "phases.h"

namespace dn {
namespace {

constexpr int kQueriesPerItem = 48;
// Sequences with at most so many new tokens may have their keys shared out among threads.
constexpr int kFewRows = 16;

class Step : public Phases {
 public:
  // most: rows of any product, if some has more than B.
  Step(dn_model &model, int B, int most = 0)
      : Phases(*model.pool, *model.kernels, model.rows8), m_(model), c_(model.config), B_(B) {
    const size_t rows = std::max(B, most);
    q_width_ = c_.heads * c_.head_dim;
    kv_width_ = c_.kv_heads * c_.head_dim;
    qkv_width_ = q_width_ + 2 * kv_width_;
    m_.hidden.grow(sizeof(float) * rows * c_.width);
    m_.normed.grow(sizeof(float) * rows * c_.width);
    m_.qkv.grow(sizeof(float) * rows * qkv_width_);
    m_.attended.grow(sizeof(float) * rows * q_width_);
    m_.gate_up.grow(sizeof(float) * rows * 2 * c_.inner);
    m_.gated.grow(sizeof(float) * rows * c_.inner);
    // Whole cache lines a thread, or two would write to one.
    scratch_floats_ = (attend_scratch(c_.head_dim) + 2 * kQueriesPerItem * (c_.head_dim + 2)) / 16 *
                          16 + 32;
    m_.scratch.grow(sizeof(float) * scratch_floats_ * pool_.threads());
    make_room(std::max({c_.width, q_width_, c_.inner}), rows);
  }

  void embed(const int32_t *ids) {
    rows(B_, [=, this](int row) {
      std::memcpy(hidden(row), m_.embedding + static_cast<size_t>(ids[row]) * c_.width,
                  sizeof(float) * c_.width);
    });
  }

  void attention_block(int index, const dn_batch &b) {
    const Layer &layer = m_.layers[index];
    norm_and_tap(index, b);
    product(*layer.qkv, m_.normed.as<float>(), B_, m_.qkv.as<float>(), qkv_width_, false);
    store_keys(index, b);
    attend(index, b);
    quantise_rows(B_, m_.attended.as<float>(), *layer.out);
    product(*layer.out, m_.attended.as<float>(), B_, m_.hidden.as<float>(), c_.width, true);
  }

  void mlp_block(int index) {
    const Layer &layer = m_.layers[index];
    norm(B_, nullptr, layer.mlp_norm, *layer.gate_up);
    product(*layer.gate_up, m_.normed.as<float>(), B_, m_.gate_up.as<float>(), 2 * c_.inner,
            false);
    gate_rows(B_, m_.gate_up.as<float>(), c_.inner, m_.gated.as<float>(), layer.down->int8);
    product(*layer.down, m_.gated.as<float>(), B_, m_.hidden.as<float>(), c_.width, true);
  }

  void head(int L, const int32_t *which, float *logits) {
    if (!L) return;
    norm(L, which, m_.final_norm, *m_.head);
    product(*m_.head, m_.normed.as<float>(), L, logits, c_.vocab, false);
  }

  // Everything of a step that multiplies by weights, on whatever is in the buffers.
  void products(int L, float *logits) {
    for (const Layer &layer : m_.layers) {
      product(*layer.qkv, m_.normed.as<float>(), B_, m_.qkv.as<float>(), qkv_width_, false);
      product(*layer.out, m_.attended.as<float>(), B_, m_.hidden.as<float>(), c_.width, false);
      product(*layer.gate_up, m_.normed.as<float>(), B_, m_.gate_up.as<float>(), 2 * c_.inner,
              false);
      product(*layer.down, m_.gated.as<float>(), B_, m_.hidden.as<float>(), c_.width, false);
    }
    if (L) product(*m_.head, m_.normed.as<float>(), L, logits, c_.vocab, false);
  }

  void project(const dn_batch &b) {
    for (int p = 0; p < b.projections && b.F; p++) {
      const dn_projection &one = b.projection[p];
      const int n = one.matrix ? one.matrix->n : one.layers * c_.width;
      if (one.matrix) {
        quantise_rows(b.F, concatenated(b, p), *one.matrix);
        product(*one.matrix, concatenated(b, p), b.F, one.out, n, false);
      }
      if (one.norm)
        rows(b.F, [=, this](int row) {
          float *out = one.out + static_cast<size_t>(row) * n;
          k_.norm(out, one.norm, one.eps, n, out);
        });
    }
  }

  void prepare_taps(const dn_batch &b) {
    size_t floats = 0;
    for (int p = 0; p < b.projections; p++) {
      floats += static_cast<size_t>(b.F) * b.projection[p].layers * c_.width;
      if (b.projection[p].matrix) make_room(b.projection[p].matrix->k, b.F);
    }
    m_.wide.grow(sizeof(float) * floats);
  }

 private:
  float *hidden(int row) const {
    return m_.hidden.as<float>() + static_cast<size_t>(row) * c_.width;
  }

  // Where a projection's inputs from one layer go.
  struct Tap {
    float *to;
    size_t ld;
  };

  std::vector<Tap> taps_of(int layer, const dn_batch &b) const {
    std::vector<Tap> taps;
    for (int p = 0; p < b.projections && b.F; p++) {
      const dn_projection &one = b.projection[p];
      for (int j = 0; j < one.layers; j++)
        if (one.layer_ids[j] == layer)
          taps.push_back({concatenated(b, p) + static_cast<size_t>(j) * c_.width,
                          static_cast<size_t>(one.layers) * c_.width});
    }
    return taps;
  }

  // The norm before a layer, and of the rows that it reads those that projections read too; for
  // that alone threads would have to wait for each other once more.
  void norm_and_tap(int index, const dn_batch &b) {
    const Layer &layer = m_.layers[index];
    const float *weight = layer.attention_norm.data();
    rows(B_, [=, this, &b, int8 = layer.qkv->int8, taps = taps_of(index - 1, b)](int row) {
      norm_row(row, hidden(row), weight, c_.width, c_.norm_eps, m_.normed.as<float>(), int8);
      for (const Tap &tap : taps)
        for (int f = row; f < b.F; f += B_)
          std::memcpy(tap.to + f * tap.ld, hidden(b.feature_rows[f]), sizeof(float) * c_.width);
    });
  }

  float *concatenated(const dn_batch &b, int projection) const {
    if (!b.projection[projection].matrix) return b.projection[projection].out;
    float *at = m_.wide.as<float>();
    for (int p = 0; p < projection; p++)
      at += static_cast<size_t>(b.F) * b.projection[p].layers * c_.width;
    return at;
  }

  void norm(int count, const int32_t *which, const std::vector<float> &weight,
            const dn_matrix &for_matrix) {
    norm_rows(count, which, m_.hidden.as<float>(), weight, c_.norm_eps, m_.normed.as<float>(),
              for_matrix.int8);
  }

  void *pool_at(const Buffer &pool, int64_t block, int kv_head) const {
    const size_t head = static_cast<size_t>(c_.head_dim) * c_.block_size;
    return pool.as<char>() + (block * m_.block_numbers() + kv_head * head) * m_.kv_size();
  }

  // Norms and rotates queries and keys, and stores keys and values in their blocks.
  void store_keys(int index, const dn_batch &b) {
    const Layer *layer = &m_.layers[index];
    const dn_batch *batch = &b;
    rows(B_, [=, this](int row) {
      const int hd = c_.head_dim, half = hd / 2;
      float *q = m_.qkv.as<float>() + static_cast<size_t>(row) * qkv_width_;
      float *key = q + q_width_, *value = key + kv_width_;
      const size_t at = static_cast<size_t>(batch->positions[row]) * half;
      for (int h = 0; h < c_.heads + c_.kv_heads; h++) {
        const auto &norm = h < c_.heads ? layer->q_norm : layer->k_norm;
        if (!norm.empty()) k_.norm(q + h * hd, norm.data(), c_.norm_eps, hd, q + h * hd);
        k_.rotate(q + h * hd, batch->cos + at, batch->sin + at, hd);
      }
      const int r = static_cast<int>(std::upper_bound(batch->query_start,
                                                      batch->query_start + batch->R + 1, row) -
                                     batch->query_start) - 1;
      const int t = batch->context_len[r] + row - batch->query_start[r];
      const int64_t block =
          batch->block_table[static_cast<size_t>(r) * batch->table_width + t / c_.block_size];
      for (int h = 0; h < c_.kv_heads; h++)
        k_.store_kv(key + h * hd, value + h * hd, hd, c_.block_size, t % c_.block_size,
                    c_.half_kv != 0, pool_at(m_.keys[index], block, h),
                    pool_at(m_.values[index], block, h));
    });
  }

  // An item of attention: of a sequence and KV heads [head, heads), queries [begin, end) (one is a
  // row and one of the heads that share a KV head) over partitions [first, last). partial >= 0:
  // only computed, at this offset of `partials`, since the partitions of one head are shared out.
  struct Item {
    int sequence, head, heads, begin, end, first, last;
    int64_t partial;
    int64_t work() const { return int64_t{heads - head} * (end - begin) * (last - first); }
  };

  void attend(int index, const dn_batch &b) {
    const Layer *layer = &m_.layers[index];
    const dn_batch *batch = &b;
    plan_attention(layer->window, b);
    const auto items = items_;
    phases_.push_back({static_cast<int>(items->size()), [=, this](int item, int thread) {
                         attend_item(*layer, index, *batch, *items, item, thread);
                       }});
    const auto shared = shared_;
    phases_.push_back({static_cast<int>(shared->size()), [=, this](int item, int thread) {
                         merge_item(*batch, (*shared)[item], thread);
                       }});
  }

  int total(const dn_batch &b, int r) const {
    return b.context_len[r] + b.query_start[r + 1] - b.query_start[r];
  }

  // Layers with the same window have the same items.
  void plan_attention(int window, const dn_batch &b) {
    if (items_ && window == planned_window_) return;
    planned_window_ = window;
    items_ = std::make_shared<std::vector<Item>>();
    shared_ = std::make_shared<std::vector<Item>>();
    const int group = c_.heads / c_.kv_heads, threads = pool_.threads();
    int whole = 0;
    for (int r = 0; r < b.R; r++)
      whole += c_.kv_heads *
               ceil_div((b.query_start[r + 1] - b.query_start[r]) * group, kQueriesPerItem);
    int64_t partial = 0;
    for (int r = 0; r < b.R; r++) {
      const int count = b.query_start[r + 1] - b.query_start[r];
      const int low = window ? std::max(b.context_len[r] - window + 1, 0) : 0;
      const int first = low / kPartition, last = ceil_div(total(b, r), kPartition);
      const bool share = threads > 1 && whole < 4 * threads && count <= kFewRows &&
                         last - first > 1;
      // With sequences enough for all threads, one item does all heads of a sequence.
      const bool together = b.R >= 4 * threads && count * group <= kQueriesPerItem;
      const int step = together ? c_.kv_heads : 1;
      for (int h = 0; h < c_.kv_heads && count; h += step) {
        if (!share) {
          for (int q = 0; q < count * group; q += kQueriesPerItem)
            items_->push_back(
                {r, h, h + step, q, std::min(q + kQueriesPerItem, count * group), first, last, -1});
          continue;
        }
        shared_->push_back({r, h, h + 1, 0, count * group, first, last, partial});
        const int parts = std::min(last - first, 4 * threads);
        for (int i = 0; i < parts; i++) {
          const int from = first + (last - first) * i / parts;
          const int to = first + (last - first) * (i + 1) / parts;
          items_->push_back({r, h, h + 1, 0, count * group, from, to,
                             partial + int64_t{from - first} * count * group});
        }
        partial += int64_t{last - first} * count * group;
      }
    }
    m_.partials.grow(sizeof(float) * partial * (c_.head_dim + 2));
    // Long items first, so that the end is even.
    std::stable_sort(items_->begin(), items_->end(),
                     [](const Item &a, const Item &c) { return a.work() > c.work(); });
  }

  float *scratch(int thread) const { return m_.scratch.as<float>() + thread * scratch_floats_; }

  float *attended(const dn_batch &b, const Item &item, int kv_head, int query) const {
    const int group = c_.heads / c_.kv_heads;
    const size_t row = b.query_start[item.sequence] + query / group;
    return m_.attended.as<float>() + row * q_width_ +
           (kv_head * group + query % group) * c_.head_dim;
  }

  const int32_t *table(const dn_batch &b, int sequence) const {
    return b.block_table + static_cast<size_t>(sequence) * b.table_width;
  }

  // What a thread most likely reads after a KV head of an item.
  Attention::Next after(const dn_batch &b, const std::vector<Item> &items, int number,
                        int kv_head) const {
    const Item *item = &items[number];
    if (kv_head + 1 == item->heads) {
      if (number + 1 == static_cast<int>(items.size())) return {};
      item++;
      kv_head = item->head - 1;
    }
    return {table(b, item->sequence), kv_head + 1, item->first, total(b, item->sequence)};
  }

  void attend_item(const Layer &layer, int index, const dn_batch &b,
                   const std::vector<Item> &items, int number, int thread) const {
    const Item &item = items[number];
    const int hd = c_.head_dim, ld = hd + 2;
    Attention a{};
    a.keys = m_.keys[index].as<void>();
    a.values = m_.values[index].as<void>();
    a.table = table(b, item.sequence);
    a.block_size = c_.block_size;
    a.kv_heads = c_.kv_heads;
    a.head_dim = hd;
    a.window = layer.window;
    a.scale = c_.query_scale;
    float *work = scratch(thread);
    float *merged = work + attend_scratch(hd), *partial = merged + kQueriesPerItem * ld;
    for (a.kv_head = item.head; a.kv_head < item.heads; a.kv_head++)
      for (int begin = item.begin; begin < item.end; begin += kQueriesPerItem) {
        Query queries[kQueriesPerItem];
        const int count = std::min(kQueriesPerItem, item.end - begin);
        fill(b, item, a.kv_head, begin, count, queries);
        const bool only = item.partial >= 0;
        const int sees = queries[count - 1].index + 1;
        // Shared partitions are all written, also those that these queries do not see.
        const int last = only ? item.last : std::min(item.last, ceil_div(sees, kPartition));
        for (int i = 0; i < count && !only; i++) start_merge(merged + i * ld, hd);
        for (int p = item.first; p < last; p++) {
          a.next = {nullptr, a.kv_head, p + 1, total(b, item.sequence)};
          if (p + 1 < last) a.next.table = a.table;
          else if (begin + kQueriesPerItem >= item.end) a.next = after(b, items, number, a.kv_head);
          float *to = only ? partials_of(item, p, begin - item.begin) : partial;
          k_.attend(a, queries, count, p, c_.half_kv != 0, work, to);
          for (int i = 0; i < count && !only; i++)
            k_.merge(merged + i * ld, partial + i * ld, hd);
        }
        for (int i = 0; i < count && !only; i++)
          k_.finish(merged + i * ld, hd, attended(b, item, a.kv_head, begin + i));
      }
  }

  void fill(const dn_batch &b, const Item &item, int kv_head, int begin, int count,
            Query *queries) const {
    const int group = c_.heads / c_.kv_heads;
    for (int i = 0; i < count; i++) {
      const int row = (begin + i) / group, head = kv_head * group + (begin + i) % group;
      queries[i].q = m_.qkv.as<float>() +
                     static_cast<size_t>(b.query_start[item.sequence] + row) * qkv_width_ +
                     head * c_.head_dim;
      queries[i].index = b.context_len[item.sequence] + row;
    }
  }

  float *partials_of(const Item &item, int partition, int query) const {
    const int64_t row = int64_t{partition - item.first} * (item.end - item.begin) + query;
    return m_.partials.as<float>() + (item.partial + row) * (c_.head_dim + 2);
  }

  void merge_item(const dn_batch &b, const Item &item, int thread) const {
    const int hd = c_.head_dim;
    float *merged = scratch(thread);
    for (int i = 0; i < item.end - item.begin; i++) {
      start_merge(merged, hd);
      for (int p = item.first; p < item.last; p++) k_.merge(merged, partials_of(item, p, i), hd);
      k_.finish(merged, hd, attended(b, item, item.head, i));
    }
  }

  dn_model &m_;
  const dn_config &c_;
  int B_, q_width_, kv_width_, qkv_width_;
  size_t scratch_floats_;
  int planned_window_ = 0;
  std::shared_ptr<std::vector<Item>> items_, shared_;
};

}  // namespace

void run_step(dn_model &model, const dn_batch &b) {
  Step step(model, b.B, std::max(b.L, b.F));
  step.prepare_taps(b);
  step.embed(b.token_ids);
  for (int i = 0; i < model.config.layers; i++) {
    step.attention_block(i, b);
    step.mlp_block(i);
  }
  step.project(b);
  step.head(b.L, b.logit_rows, b.logits);
  step.run();
}

void run_products(dn_model &model, int B, int L, float *logits) {
  Step step(model, B, L);
  step.products(L, logits);
  step.run();
}

void multiply(dn_model &model, const dn_matrix &w, const float *x, int rows, float *out) {
  Step step(model, rows);
  step.make_room(w.k, rows);
  step.quantise_rows(rows, x, w);
  step.product(w, x, rows, out, w.n, false);
  step.run();
}

}  // namespace dn
