// Context injection and the parallel pass of a drafter: the phases of every layer, and its C
// interface.
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "drafter.h"
#include "errors.h"
#include "phases.h"

namespace dn {
namespace {

constexpr int kQueriesPerItem = 48;
constexpr int kLastStart = 1 << 30;  // positions of a block stay far from overflow

class DraftStep : public Phases {
 public:
  // For R blocks, or `context` rows of new positions.
  DraftStep(dn_drafter &d, int R, int context)
      : Phases(*d.pool, *d.kernels, d.rows8), d_(d), c_(d.config), R_(R), B_(R * c_.gamma) {
    const size_t rows = std::max(B_, context);
    q_width_ = d.query_width();
    kv_width_ = d.kv_width();
    d.qkv.grow(sizeof(float) * std::max<size_t>(static_cast<size_t>(B_) * qkv_width(),
                                                static_cast<size_t>(context) * 2 * kv_width_));
    d.turns.grow(sizeof(float) * rows * c_.head_dim);
    make_room(std::max({c_.width, q_width_, c_.inner}), rows);
    if (!R) return;
    d.hidden.grow(sizeof(float) * B_ * c_.width);
    d.normed.grow(sizeof(float) * B_ * c_.width);
    d.attended.grow(sizeof(float) * B_ * q_width_);
    d.gate_up.grow(sizeof(float) * B_ * 2 * c_.inner);
    d.gated.grow(sizeof(float) * B_ * c_.inner);
    d.logits.grow(sizeof(float) * B_ * c_.draft_vocab);
    // Whole cache lines a thread, or two would write to one.
    scratch_floats_ = std::max(attend_scratch(c_.head_dim) + 2 * kQueriesPerItem * (c_.head_dim + 2),
                               2 * select_space(c_.draft_vocab, c_.candidates)) / 16 * 16 + 32;
    d.scratch.grow(sizeof(float) * scratch_floats_ * pool_.threads());
  }

  // --- Context: what features add to each layer (eq. 3)

  void context(const dn_draft_context &c, int N, const std::vector<int32_t> &ends) {
    const dn_draft_context *call = &c;
    const std::vector<int32_t> *of = &ends;
    quantise_rows(N, c.features, *d_.layers[0].kv);
    rows(N, [=, this](int row) {
      const auto [r, at] = place(*of, row);
      turn(row, call->first[r] + at);
    });
    for (int i = 0; i < c_.layers; i++) {
      product(*d_.layers[i].kv, c.features, N, d_.qkv.as<float>(), 2 * kv_width_, false);
      const DraftLayer *layer = &d_.layers[i];
      rows(N, [=, this](int row) {
        const auto [r, at] = place(*of, row);
        keep(*layer, d_.qkv.as<float>() + static_cast<size_t>(row) * 2 * kv_width_, row,
             {call->rings[r], call->blocks[r], i}, (call->slots[r] + at) % call->window);
      });
    }
  }

  // --- Blocks

  void embed(const dn_draft_block &b) {
    const dn_draft_block *call = &b;
    rows(B_, [=, this](int row) {
      const int id = row % c_.gamma ? c_.mask : call->anchors[row / c_.gamma];
      const float *from = d_.embedding + static_cast<size_t>(id) * c_.width;
      float *to = d_.hidden.as<float>() + static_cast<size_t>(row) * c_.width;
      for (int i = 0; i < c_.width; i++) to[i] = from[i] * c_.embed_scale;
      turn(row, call->starts[row / c_.gamma] + row % c_.gamma);
    });
  }

  void attention_block(int index, const dn_draft_block &b) {
    const DraftLayer *layer = &d_.layers[index];
    const dn_draft_block *call = &b;
    float *normed = d_.normed.as<float>(), *qkv = d_.qkv.as<float>();
    norm_rows(B_, nullptr, d_.hidden.as<float>(), layer->attention_norm, c_.norm_eps, normed,
              layer->query->int8);
    product(*layer->query, normed, B_, qkv, qkv_width(), false);
    product(*layer->kv, normed, B_, qkv + q_width_, qkv_width(), false);
    rows(B_, [=, this](int row) {
      const int r = row / c_.gamma, at = row % c_.gamma, hd = c_.head_dim;
      const float *turn = turns(row);
      float *query = d_.qkv.as<float>() + static_cast<size_t>(row) * qkv_width();
      for (int h = 0; h < c_.heads; h++) {
        k_.norm(query + h * hd, layer->q_norm.data(), c_.norm_eps, hd, query + h * hd);
        k_.rotate(query + h * hd, turn, turn + hd / 2, hd);
      }
      keep(*layer, query + q_width_, row, {call->rings[r], call->blocks[r], index},
           call->held[r] + at);
    });
    const int heads = c_.kv_heads;
    phases_.push_back({R_ * heads, [=, this](int item, int thread) {
                         attend(*call, index, item / heads, item % heads, thread);
                       }});
    quantise_rows(B_, d_.attended.as<float>(), *layer->out);
    product(*layer->out, d_.attended.as<float>(), B_, d_.hidden.as<float>(), c_.width, true);
  }

  void mlp_block(int index) {
    const DraftLayer &layer = d_.layers[index];
    norm_rows(B_, nullptr, d_.hidden.as<float>(), layer.mlp_norm, c_.norm_eps,
              d_.normed.as<float>(), layer.gate_up->int8);
    product(*layer.gate_up, d_.normed.as<float>(), B_, d_.gate_up.as<float>(), 2 * c_.inner, false);
    gate_rows(B_, d_.gate_up.as<float>(), c_.inner, d_.gated.as<float>(), layer.down->int8);
    product(*layer.down, d_.gated.as<float>(), B_, d_.hidden.as<float>(), c_.width, true);
  }

  // h and the candidates of the first positions of each block; `which`: their rows.
  void head(const std::vector<int32_t> &which) {
    const int L = static_cast<int>(which.size()), M = c_.candidates, V = c_.draft_vocab;
    norm_rows(L, which.data(), d_.hidden.as<float>(), d_.norm, c_.norm_eps, d_.normed.as<float>(),
              d_.lm_head->int8);
    product(*d_.lm_head, d_.normed.as<float>(), L, d_.logits.as<float>(), V, false);
    if (d_.prepare)
      product(*d_.prepare, d_.normed.as<float>(), L, d_.prepared.as<float>(), d_.prepare->n, false);
    // An item a row: rows() would not say which thread's space it may use.
    phases_.push_back({L, [=, this](int row, int thread) {
                         float *space = scratch(thread), *base = d_.base.as<float>() + row * long{M};
                         select_largest(d_.logits.as<float>() + static_cast<size_t>(row) * V, V, M,
                                        space,
                                        reinterpret_cast<int32_t *>(space + select_space(V, M)),
                                        d_.columns.as<int32_t>() + row * long{M}, base);
                         if (c_.softcap)
                           for (int i = 0; i < M; i++)
                             base[i] = __builtin_tanhf(base[i] / c_.softcap) * c_.softcap;
                       }});
  }

  void draw(const dn_draft_block &b) {
    const dn_draft_block *call = &b;
    phases_.push_back({R_, [=, this](int r, int thread) {
                         for (int k = 0; k < call->steps; k++) draw_one(*call, r, k, scratch(thread));
                       }});
  }

  void products(int R, int context) {
    const int rows = R * c_.gamma;
    float *x = d_.normed.as<float>();
    for (const DraftLayer &layer : d_.layers) {
      product(*layer.kv, x, std::min(context, rows), d_.qkv.as<float>(), 2 * kv_width_, false);
      product(*layer.query, x, rows, d_.qkv.as<float>(), qkv_width(), false);
      product(*layer.kv, x, rows, d_.qkv.as<float>() + q_width_, qkv_width(), false);
      product(*layer.out, d_.attended.as<float>(), rows, d_.hidden.as<float>(), c_.width, false);
      product(*layer.gate_up, x, rows, d_.gate_up.as<float>(), 2 * c_.inner, false);
      product(*layer.down, d_.gated.as<float>(), rows, d_.hidden.as<float>(), c_.width, false);
    }
    product(*d_.lm_head, x, rows, d_.logits.as<float>(), c_.draft_vocab, false);
  }

 private:
  // One layer's part of a ring.
  struct Ring {
    void *at;
    int blocks, layer;
  };

  int qkv_width() const { return q_width_ + 2 * kv_width_; }
  float *scratch(int thread) const { return d_.scratch.as<float>() + thread * scratch_floats_; }

  char *part(const Ring &ring, int values) const {
    const size_t bytes = d_.block_numbers() * ring.blocks * (c_.half_kv ? 2 : 4);
    return static_cast<char *>(ring.at) + (2 * ring.layer + values) * bytes;
  }

  // Session of a row, and which of its new rows that is.
  struct Place {
    int session, row;
  };
  static Place place(const std::vector<int32_t> &ends, int row) {
    const auto r = std::upper_bound(ends.begin(), ends.end(), row) - ends.begin();
    return {static_cast<int>(r), row - (r ? ends[r - 1] : 0)};
  }

  // cos and sin of a row's position, [head_dim / 2] each.
  float *turns(int row) const { return d_.turns.as<float>() + static_cast<size_t>(row) * c_.head_dim; }
  void turn(int row, int position) const {
    const int half = c_.head_dim / 2;
    float *to = turns(row);
    for (int i = 0; i < half; i++) {
      const float angle = static_cast<float>(position) / d_.wavelengths[i];
      to[i] = std::cos(angle);
      to[half + i] = std::sin(angle);
    }
  }

  // Norms and rotates the keys of [keys; values] of a row, and puts both in a slot.
  void keep(const DraftLayer &layer, float *kv, int row, const Ring &ring, int slot) const {
    const int hd = c_.head_dim, size = c_.block_size;
    const float *turn = turns(row);
    for (int h = 0; h < c_.kv_heads; h++) {
      float *key = kv + h * hd;
      k_.norm(key, layer.k_norm.data(), c_.norm_eps, hd, key);
      k_.rotate(key, turn, turn + hd / 2, hd);
      const size_t at = ((slot / size) * d_.block_numbers() + static_cast<size_t>(h) * hd * size) *
                        (c_.half_kv ? 2 : 4);
      k_.store_kv(key, kv + kv_width_ + h * hd, hd, size, slot % size, c_.half_kv != 0,
                  part(ring, 0) + at, part(ring, 1) + at);
    }
  }

  // The block's queries of one KV head over all of the ring: each sees the whole block.
  void attend(const dn_draft_block &b, int layer, int r, int head, int thread) const {
    const int hd = c_.head_dim, ld = hd + 2, group = c_.heads / c_.kv_heads;
    const int length = b.held[r] + c_.gamma, queries = c_.gamma * group;
    const Ring ring{b.rings[r], b.blocks[r], layer};
    Attention a{};
    a.keys = part(ring, 0);
    a.values = part(ring, 1);
    a.table = d_.in_order.data();
    a.block_size = c_.block_size;
    a.kv_heads = c_.kv_heads;
    a.kv_head = head;
    a.head_dim = hd;
    a.scale = d_.query_scale;
    float *work = scratch(thread);
    float *merged = work + attend_scratch(hd), *partial = merged + kQueriesPerItem * ld;
    for (int begin = 0; begin < queries; begin += kQueriesPerItem) {
      Query asked[kQueriesPerItem];
      const int count = std::min(kQueriesPerItem, queries - begin);
      for (int i = 0; i < count; i++) {
        const size_t row = static_cast<size_t>(r) * c_.gamma + (begin + i) / group;
        asked[i].q = d_.qkv.as<float>() + row * qkv_width() +
                     (head * group + (begin + i) % group) * hd;
        asked[i].index = length - 1;
        start_merge(merged + i * ld, hd);
      }
      const int partitions = ceil_div(length, kPartition);
      for (int p = 0; p < partitions; p++) {
        a.next = {p + 1 < partitions ? a.table : nullptr, head, p + 1, length};
        k_.attend(a, asked, count, p, c_.half_kv != 0, work, partial);
        for (int i = 0; i < count; i++) k_.merge(merged + i * ld, partial + i * ld, hd);
      }
      for (int i = 0; i < count; i++) {
        const size_t row = static_cast<size_t>(r) * c_.gamma + (begin + i) / group;
        k_.finish(merged + i * ld, hd, d_.attended.as<float>() + row * q_width_ +
                                           (head * group + (begin + i) % group) * hd);
      }
    }
  }

  void draw_one(const dn_draft_block &b, int r, int k, float *logits) const {
    const size_t row = static_cast<size_t>(r) * b.steps + k;
    draft_position(d_, r, k, logits, b.confidences + row);
    const int chosen = largest(logits, c_.candidates);
    if (c_.confidence == DN_CONFIDENCE_NONE)
      b.confidences[row] = top_logit(logits, c_.candidates, chosen);
    b.columns[row] = d_.columns.as<int32_t>()[row * c_.candidates + chosen];
    d_.previous[r] = b.columns[row];
  }

  dn_drafter &d_;
  const dn_draft_config &c_;
  int R_, B_, q_width_, kv_width_;
  size_t scratch_floats_ = 0;
};

std::vector<float> copied(const float *from, size_t n) {
  return from ? std::vector<float>(from, from + n) : std::vector<float>();
}

void check(const dn_draft_context &c, const dn_drafter &d) {
  for (int r = 0; r < c.R; r++) {
    const int room = c.blocks[r] * d.config.block_size;
    require(c.counts[r] >= 0 && c.counts[r] <= c.window, "new positions", c.counts[r], c.window);
    require(c.first[r] >= 0, "position", c.first[r], 0);
    require(c.slots[r] >= 0 && c.slots[r] < c.window, "slot", c.slots[r], c.window - 1);
    const int last = std::min(c.slots[r] + c.counts[r], c.window);
    require(last <= room, "slots of a ring", last, room);
  }
}

void check(const dn_draft_block &b, const dn_drafter &d) {
  const dn_draft_config &c = d.config;
  require(b.steps >= 1 && b.steps <= c.gamma, "steps", b.steps, c.gamma);
  for (int r = 0; r < b.R; r++) {
    const int room = b.blocks[r] * c.block_size, last = b.held[r] + c.gamma;
    require(b.anchors[r] >= 0 && b.anchors[r] < c.vocab, "anchor", b.anchors[r], c.vocab - 1);
    require(b.held[r] >= 0 && last <= room, "slots of a ring", last, room);
    require(b.starts[r] >= 0 && b.starts[r] <= kLastStart, "position", b.starts[r], kLastStart);
  }
}

// A table that says blocks lie in order, for rings of so many.
void grow_table(dn_drafter &d, const int32_t *blocks, int R) {
  for (int r = 0; r < R; r++)
    while (static_cast<int>(d.in_order.size()) < blocks[r])
      d.in_order.push_back(static_cast<int32_t>(d.in_order.size()));
}

}  // namespace

void inject(dn_drafter &d, const dn_draft_context &c) {
  check(c, d);
  std::vector<int32_t> ends;
  int N = 0;
  for (int r = 0; r < c.R; r++) ends.push_back(N += c.counts[r]);
  if (!N) return;
  DraftStep step(d, 0, N);
  step.context(c, N, ends);
  step.run();
}

void draft_block(dn_drafter &d, const dn_draft_block &b) {
  if (!b.R) return;
  check(b, d);
  grow_table(d, b.blocks, b.R);
  const dn_draft_config &c = d.config;
  const size_t L = static_cast<size_t>(b.R) * b.steps;
  d.R = b.R;
  d.steps = b.steps;
  d.prepared.grow(sizeof(float) * L * std::max(d.prepared_width(), 1));
  d.columns.grow(sizeof(int32_t) * L * c.candidates);
  d.base.grow(sizeof(float) * L * c.candidates);
  d.states.assign(static_cast<size_t>(b.R) * c.rank, 0.0f);
  d.previous.resize(b.R);
  for (int r = 0; r < b.R; r++) d.previous[r] = d.index ? d.index[b.anchors[r]] : 0;
  std::vector<int32_t> which;
  for (int r = 0; r < b.R; r++)
    for (int k = 0; k < b.steps; k++) which.push_back(r * c.gamma + k);
  DraftStep step(d, b.R, 0);
  step.embed(b);
  for (int i = 0; i < c.layers; i++) {
    step.attention_block(i, b);
    step.mlp_block(i);
  }
  step.head(which);
  if (b.greedy) step.draw(b);
  step.run();
  if (!b.greedy) std::memcpy(b.candidates, d.columns.as<void>(), sizeof(int32_t) * L * c.candidates);
}

void draft_next(dn_drafter &d, int k, const int32_t *chosen, float *logits, float *confidences) {
  const int M = d.config.candidates;
  require(k >= 0 && k < d.steps && (chosen != nullptr) == (k > 0), "position", k, d.steps - 1);
  for (int r = 0; r < d.R; r++) {
    if (chosen) {
      require(chosen[r] >= 0 && chosen[r] < M, "candidate", chosen[r], M - 1);
      const size_t row = static_cast<size_t>(r) * d.steps + k - 1;
      d.previous[r] = d.columns.as<int32_t>()[row * M + chosen[r]];
    }
    float *of_row = logits + static_cast<size_t>(r) * M;
    draft_position(d, r, k, of_row, confidences + r);
    if (d.config.confidence == DN_CONFIDENCE_NONE)
      confidences[r] = top_logit(of_row, M, largest(of_row, M));
  }
}

void draft_products(dn_drafter &d, int R, int context) {
  DraftStep step(d, R, context);
  step.products(R, context);
  step.run();
}

}  // namespace dn

using dn::guarded;
using dn::require;

extern "C" {

dn_drafter *dn_drafter_create(const dn_draft_config *config, dn_model *beside,
                              const float *embedding) {
  std::unique_ptr<dn_drafter> drafter;
  const int failed = guarded([&] {
    const dn_draft_config &c = *config;
    require(c.head_dim % 16 == 0 && c.head_dim <= 512, "head_dim", c.head_dim, 512);
    require(c.threads >= 1 && c.threads <= 1024, "threads", c.threads, 1024);
    require(c.heads % c.kv_heads == 0, "heads", c.heads, c.kv_heads);
    require(c.candidates >= 1 && c.candidates <= c.draft_vocab, "candidates", c.candidates,
            c.draft_vocab);
    drafter = std::make_unique<dn_drafter>();
    drafter->config = c;
    drafter->config.kernels = nullptr;
    const size_t bytes = sizeof(float) * c.vocab * c.width;
    drafter->shares = beside && beside->config.vocab == c.vocab && beside->config.width == c.width &&
                      !std::memcmp(beside->embedding, embedding, bytes);
    drafter->embedding = drafter->shares ? beside->embedding : embedding;
    drafter->kernels = dn::find_kernels(c.kernels);
    drafter->query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(c.head_dim));
    drafter->layers.resize(c.layers);
    if (!beside) drafter->own_pool = std::make_unique<dn::Pool>(c.threads);
    drafter->pool = beside ? beside->pool.get() : drafter->own_pool.get();
  });
  return failed ? nullptr : drafter.release();
}

int dn_drafter_set_layer(dn_drafter *drafter, int index, const dn_draft_layer *from) {
  return guarded([&] {
    const dn_draft_config &c = drafter->config;
    require(index >= 0 && index < c.layers, "layer", index, c.layers - 1);
    const int q = drafter->query_width(), kv = drafter->kv_width();
    const auto pack = [&](const float *w, int n, int k, const float *bias) {
      return dn::pack(*drafter->pool, drafter->kernels, c.int8 != 0, w, n, k, bias);
    };
    dn::DraftLayer &layer = drafter->layers[index];
    layer.query = pack(from->query, q, c.width, from->query_bias);
    layer.kv = pack(from->kv, 2 * kv, c.width, from->kv_bias);
    layer.out = pack(from->out, c.width, q, from->out_bias);
    layer.gate_up = pack(from->gate_up, 2 * c.inner, c.width, nullptr);
    layer.down = pack(from->down, c.width, c.inner, nullptr);
    layer.attention_norm = dn::copied(from->attention_norm, c.width);
    layer.mlp_norm = dn::copied(from->mlp_norm, c.width);
    layer.q_norm = dn::copied(from->q_norm, c.head_dim);
    layer.k_norm = dn::copied(from->k_norm, c.head_dim);
  });
}

int dn_drafter_set_head(dn_drafter *drafter, const dn_draft_head *from) {
  return guarded([&] {
    const dn_draft_config &c = drafter->config;
    dn_drafter &d = *drafter;
    d.norm = dn::copied(from->norm, c.width);
    d.wavelengths = dn::copied(from->wavelengths, c.head_dim / 2);
    d.lm_head = dn::pack(*d.pool, d.kernels, c.int8 != 0, from->lm_head, c.draft_vocab, c.width,
                         nullptr);
    d.w1 = from->w1;
    d.w2 = from->w2;
    d.index = from->index;
    const bool rnn = c.head == DN_HEAD_RNN;
    const int maps = rnn ? 3 * c.rank : c.rank, reads = rnn ? 2 * c.rank : c.rank;
    if (from->prepare)  // small, and what a gate closes should not be rounded: float32
      d.prepare = dn::pack(*d.pool, d.kernels, false, from->prepare, maps, c.width,
                           from->prepare_bias);
    d.step = dn::copied(from->step, static_cast<size_t>(maps) * reads);
    d.confidence_hidden = dn::copied(from->confidence_hidden, c.width);
    d.confidence_previous = dn::copied(from->confidence_previous, c.rank);
    d.confidence_bias = from->confidence_bias;
  });
}

int dn_drafter_shares(const dn_drafter *drafter) { return drafter->shares; }

void dn_drafter_destroy(dn_drafter *drafter) { delete drafter; }

const char *dn_drafter_kernels(const dn_drafter *drafter) { return drafter->kernels->name; }

int dn_drafter_inject(dn_drafter *drafter, const dn_draft_context *context) {
  return guarded([&] { dn::inject(*drafter, *context); });
}

int dn_drafter_block(dn_drafter *drafter, const dn_draft_block *block) {
  return guarded([&] { dn::draft_block(*drafter, *block); });
}

int dn_drafter_next(dn_drafter *drafter, int k, const int32_t *chosen, float *logits,
                    float *confidences) {
  return guarded([&] { dn::draft_next(*drafter, k, chosen, logits, confidences); });
}

int dn_drafter_products(dn_drafter *drafter, int32_t R, int32_t context) {
  return guarded([&] { dn::draft_products(*drafter, R, context); });
}
}
