//! Small language models, and their computation by tensor-parallel ranks, in plain arithmetic.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

/// A row-major tensor of at most two dimensions.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    rows: usize,
    columns: usize,
    pub(crate) at: Vec<f64>,
}

/// The tensors that one rank holds, by key.
pub(crate) type Held = BTreeMap<String, Matrix>;

/// A model that is made up: its tensors, and what its configuration says.
pub(crate) struct Model {
    pub(crate) tensors: Vec<(String, Vec<usize>)>,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    head: usize,
    /// The key of the logits' weight: that of the embedding, if they are tied.
    logits: &'static str,
}

const LAYERS: usize = 2;
const HIDDEN: usize = 16;
pub(crate) const TOKENS: [usize; 5] = [3, 98, 40, 3, 77];

/// Returns the tensors of a layer with Llama's names.
fn llama_layer(
    heads: usize,
    kv_heads: usize,
    head: usize,
    biases: bool,
    is_fused: bool,
) -> Vec<(String, Vec<usize>)> {
    let (q, kv) = (heads * head, kv_heads * head);
    let mut layer = vec![
        ("input_layernorm.weight", vec![HIDDEN]),
        ("post_attention_layernorm.weight", vec![HIDDEN]),
        ("self_attn.o_proj.weight", vec![HIDDEN, q]),
        ("mlp.down_proj.weight", vec![HIDDEN, 24]),
    ];
    if is_fused {
        layer.push(("self_attn.qkv_proj.weight", vec![q + 2 * kv, HIDDEN]));
        layer.push(("mlp.gate_up_proj.weight", vec![48, HIDDEN]));
    } else {
        layer.push(("self_attn.q_proj.weight", vec![q, HIDDEN]));
        layer.push(("self_attn.k_proj.weight", vec![kv, HIDDEN]));
        layer.push(("self_attn.v_proj.weight", vec![kv, HIDDEN]));
        layer.push(("mlp.gate_proj.weight", vec![24, HIDDEN]));
        layer.push(("mlp.up_proj.weight", vec![24, HIDDEN]));
    }
    if biases {
        layer.push(("self_attn.q_proj.bias", vec![q]));
        layer.push(("self_attn.k_proj.bias", vec![kv]));
        layer.push(("self_attn.v_proj.bias", vec![kv]));
    }
    layer
        .into_iter()
        .map(|(name, shape)| (name.to_owned(), shape))
        .collect()
}

fn named(
    prefix: &str,
    outside: &[(&str, &[usize])],
    layer: &[(String, Vec<usize>)],
) -> Vec<(String, Vec<usize>)> {
    let mut all: Vec<_> = outside
        .iter()
        .map(|(name, shape)| ((*name).to_owned(), shape.to_vec()))
        .collect();
    for index in 0..LAYERS {
        all.extend(
            layer
                .iter()
                .map(|(name, shape)| (format!("{prefix}{index}.{name}"), shape.clone())),
        );
    }
    all
}

/// Returns Llama with few heads of keys and values, and tied embeddings.
pub(crate) fn llama() -> Model {
    let layer = llama_layer(8, 2, 4, false, false);
    let outside: &[(&str, &[usize])] = &[
        ("model.embed_tokens.weight", &[100, HIDDEN]),
        ("model.norm.weight", &[HIDDEN]),
    ];
    let tensors = named("model.layers.", outside, &layer);
    Model {
        tensors,
        heads: 8,
        kv_heads: 2,
        head: 4,
        logits: "model.embed_tokens.weight",
    }
}

/// Returns Qwen2, which has biases; its embeddings are not tied.
pub(crate) fn qwen2() -> Model {
    let layer = llama_layer(4, 4, 4, true, false);
    let outside: &[(&str, &[usize])] = &[
        ("model.embed_tokens.weight", &[100, HIDDEN]),
        ("model.norm.weight", &[HIDDEN]),
        ("lm_head.weight", &[100, HIDDEN]),
    ];
    let tensors = named("model.layers.", outside, &layer);
    Model {
        tensors,
        heads: 4,
        kv_heads: 4,
        head: 4,
        logits: "lm_head.weight",
    }
}

/// Returns Phi-3, which has one matrix for queries, keys and values, and one for both halves of its
/// gate.
pub(crate) fn phi3() -> Model {
    let layer = llama_layer(4, 2, 4, false, true);
    let outside: &[(&str, &[usize])] = &[
        ("model.embed_tokens.weight", &[100, HIDDEN]),
        ("model.norm.weight", &[HIDDEN]),
        ("lm_head.weight", &[100, HIDDEN]),
    ];
    let tensors = named("model.layers.", outside, &layer);
    Model {
        tensors,
        heads: 4,
        kv_heads: 2,
        head: 4,
        logits: "lm_head.weight",
    }
}

/// Returns GPT-2, whose matrices are `[in, out]`.
pub(crate) fn gpt2() -> Model {
    let layer: Vec<(String, Vec<usize>)> = [
        ("ln_1.weight", vec![HIDDEN]),
        ("ln_1.bias", vec![HIDDEN]),
        ("attn.c_attn.weight", vec![HIDDEN, 3 * HIDDEN]),
        ("attn.c_attn.bias", vec![3 * HIDDEN]),
        ("attn.c_proj.weight", vec![HIDDEN, HIDDEN]),
        ("attn.c_proj.bias", vec![HIDDEN]),
        ("ln_2.weight", vec![HIDDEN]),
        ("ln_2.bias", vec![HIDDEN]),
        ("mlp.c_fc.weight", vec![HIDDEN, 4 * HIDDEN]),
        ("mlp.c_fc.bias", vec![4 * HIDDEN]),
        ("mlp.c_proj.weight", vec![4 * HIDDEN, HIDDEN]),
        ("mlp.c_proj.bias", vec![HIDDEN]),
    ]
    .map(|(name, shape)| (name.to_owned(), shape))
    .into();
    let outside: &[(&str, &[usize])] = &[
        ("wte.weight", &[100, HIDDEN]),
        ("wpe.weight", &[8, HIDDEN]),
        ("ln_f.weight", &[HIDDEN]),
        ("ln_f.bias", &[HIDDEN]),
    ];
    Model {
        tensors: named("h.", outside, &layer),
        heads: 4,
        kv_heads: 4,
        head: 4,
        logits: "wte.weight",
    }
}

impl Model {
    /// Writes the model as one safetensors file, with elements that are all different.
    pub(crate) fn write(&self, path: &Path) {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, shape) in &self.tensors {
            let start = data.len();
            let first = start / 4;
            let numbers = (first..first + shape.iter().product::<usize>()).map(|at| {
                // A fixed sequence of numbers between -0.5 and 0.5 that look random.
                let mixed = (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
                mixed as f32 / (1u64 << 24) as f32 - 0.5
            });
            data.extend(numbers.flat_map(f32::to_le_bytes));
            let info = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
            header.insert(name.clone(), info);
        }
        let header = serde_json::to_vec(&header).unwrap();
        std::fs::write(
            path,
            [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat(),
        )
        .unwrap();
    }
}

/// Reads safetensors files as any program does that knows nothing of us.
pub(crate) fn held(paths: &[PathBuf]) -> Held {
    let mut held = Held::new();
    for path in paths {
        let bytes = std::fs::read(path).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let at = view
                .data()
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| f64::from(f32::from_le_bytes(*bytes)))
                .collect();
            let (rows, columns) = match *view.shape() {
                [columns] => (1, columns),
                [rows, columns] => (rows, columns),
                _ => panic!("{name} has shape {:?}", view.shape()),
            };
            assert!(
                held.insert(name.clone(), Matrix { rows, columns, at })
                    .is_none(),
                "{name} is there twice"
            );
        }
    }
    held
}

/// Returns the files of a rank, in the order of their parts.
pub(crate) fn files_of_rank(directory: &Path, rank: usize) -> Vec<PathBuf> {
    let name = |part| directory.join(format!("model-rank-{rank}-part-{part}.safetensors"));
    (0..).map(name).take_while(|path| path.exists()).collect()
}

impl Matrix {
    fn zeros(rows: usize, columns: usize) -> Self {
        Matrix {
            rows,
            columns,
            at: vec![0.0; rows * columns],
        }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.at[row * self.columns..(row + 1) * self.columns]
    }

    fn transposed(&self) -> Self {
        let mut to = Matrix::zeros(self.columns, self.rows);
        for row in 0..self.rows {
            for column in 0..self.columns {
                to.at[column * self.rows + row] = self.at[row * self.columns + column];
            }
        }
        to
    }

    /// Returns the columns that are this part of several of these widths.
    fn columns(&self, widths: &[usize], part: usize) -> Self {
        let start: usize = widths[..part].iter().sum();
        let rows = (0..self.rows).flat_map(|row| &self.row(row)[start..start + widths[part]]);
        Matrix {
            rows: self.rows,
            columns: widths[part],
            at: rows.copied().collect(),
        }
    }

    fn add(&mut self, other: &Matrix) {
        assert_eq!(
            (self.columns, self.at.len().is_multiple_of(other.at.len())),
            (other.columns, true)
        );
        for (index, at) in self.at.iter_mut().enumerate() {
            *at += other.at[index % other.at.len()];
        }
    }

    fn map(mut self, of: impl Fn(f64) -> f64) -> Self {
        self.at.iter_mut().for_each(|at| *at = of(*at));
        self
    }
}

/// Returns `x` times the transposed `[out, in]` matrix of a layer; GPT-2 has that of `[in, out]`.
/// Without a bias.
fn linear(x: &Matrix, held: &Held, layer: &str) -> Matrix {
    let weight = &held[&format!("{layer}.weight")];
    let is_conv1d = layer.contains(".c_");
    let weight = if is_conv1d {
        weight.transposed()
    } else {
        weight.clone()
    };
    assert_eq!(x.columns, weight.columns, "{layer}");
    let mut y = Matrix::zeros(x.rows, weight.rows);
    for row in 0..x.rows {
        for out in 0..weight.rows {
            y.at[row * weight.rows + out] = x
                .row(row)
                .iter()
                .zip(weight.row(out))
                .map(|(a, b)| a * b)
                .sum();
        }
    }
    y
}

/// Computes a layer whose outputs are cut: each rank adds its part of the bias.
fn outputs(x: &Matrix, held: &Held, layer: &str) -> Matrix {
    let mut y = linear(x, held, layer);
    if let Some(bias) = held.get(&format!("{layer}.bias")) {
        y.add(bias);
    }
    y
}

/// Sums what ranks computed of a layer whose inputs are cut, and adds the bias once.
fn summed(parts: impl Iterator<Item = Matrix>, held: &Held, layer: &str) -> Matrix {
    let mut sum = parts.reduce(|mut sum, part| {
        sum.add(&part);
        sum
    });
    let sum_of_all = sum.as_mut().unwrap();
    if let Some(bias) = held.get(&format!("{layer}.bias")) {
        sum_of_all.add(bias);
    }
    sum.unwrap()
}

fn norm(x: &Matrix, held: &Held, layer: &str) -> Matrix {
    let weight = &held[&format!("{layer}.weight")];
    let mut y = x.clone();
    for row in y.at.chunks_exact_mut(x.columns) {
        let size = (row.iter().map(|at| at * at).sum::<f64>() / row.len() as f64 + 1e-6).sqrt();
        row.iter_mut()
            .zip(&weight.at)
            .for_each(|(at, weight)| *at = *at / size * weight);
    }
    if let Some(bias) = held.get(&format!("{layer}.bias")) {
        y.add(bias);
    }
    y
}

/// Computes causal attention of one rank's heads. Several heads of queries share one of keys and
/// values.
fn attention(q: &Matrix, k: &Matrix, v: &Matrix, head: usize) -> Matrix {
    let (heads, kv_heads) = (q.columns / head, k.columns / head);
    assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads));
    let mut out = Matrix::zeros(q.rows, q.columns);
    for h in 0..heads {
        let kv = h / (heads / kv_heads);
        for row in 0..q.rows {
            let query = &q.row(row)[h * head..(h + 1) * head];
            let score = |other: usize| -> f64 {
                let key = &k.row(other)[kv * head..(kv + 1) * head];
                query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>().exp()
            };
            let scores: Vec<f64> = (0..=row).map(score).collect();
            let total: f64 = scores.iter().sum();
            for (other, score) in scores.iter().enumerate() {
                let value = &v.row(other)[kv * head..(kv + 1) * head];
                for (index, value) in value.iter().enumerate() {
                    out.at[row * q.columns + h * head + index] += score / total * value;
                }
            }
        }
    }
    out
}

/// Looks tokens up in the rows that each rank has; the others give zeros.
fn embed(ranks: &[Held], key: &str) -> Matrix {
    let mut x = Matrix::zeros(TOKENS.len(), HIDDEN);
    let mut first = 0;
    for held in ranks {
        let table = &held[key];
        for (row, token) in TOKENS.iter().enumerate() {
            if (first..first + table.rows).contains(token) {
                x.at[row * HIDDEN..(row + 1) * HIDDEN].copy_from_slice(table.row(token - first));
            }
        }
        first += table.rows;
    }
    assert_eq!(first, 100, "the rows of the vocabulary");
    x
}

/// Computes the logits as tensor-parallel ranks do, each with what it holds.
pub(crate) fn logits(ranks: &[Held], model: &Model) -> Vec<f64> {
    let silu = |at: f64| at / (1.0 + (-at).exp());
    let is_gpt2 = ranks[0].contains_key("wte.weight");
    let mut x = embed(
        ranks,
        if is_gpt2 {
            "wte.weight"
        } else {
            "model.embed_tokens.weight"
        },
    );
    if is_gpt2 {
        let positions = &ranks[0]["wpe.weight"];
        x.add(&Matrix {
            rows: x.rows,
            columns: HIDDEN,
            at: positions.at[..x.at.len()].to_vec(),
        });
    }
    for layer in 0..LAYERS {
        let at = if is_gpt2 {
            format!("h.{layer}.")
        } else {
            format!("model.layers.{layer}.")
        };
        let of = |name: &str| format!("{at}{name}");
        let normed = norm(
            &x,
            &ranks[0],
            &of(if is_gpt2 { "ln_1" } else { "input_layernorm" }),
        );
        let out = of(if is_gpt2 {
            "attn.c_proj"
        } else {
            "self_attn.o_proj"
        });
        let attended = ranks.iter().map(|held| {
            // A rank has its share of each kind of heads of a fused layer, and at least one.
            let (heads, kv_heads) = (
                model.heads / ranks.len(),
                (model.kv_heads / ranks.len()).max(1),
            );
            let widths = [
                heads * model.head,
                kv_heads * model.head,
                kv_heads * model.head,
            ];
            let fused = of(if is_gpt2 {
                "attn.c_attn"
            } else {
                "self_attn.qkv_proj"
            });
            let [q, k, v] = if held.contains_key(&format!("{fused}.weight")) {
                let all = outputs(&normed, held, &fused);
                [0, 1, 2].map(|part| all.columns(&widths, part))
            } else {
                ["q", "k", "v"]
                    .map(|name| outputs(&normed, held, &of(&format!("self_attn.{name}_proj"))))
            };
            linear(&attention(&q, &k, &v, model.head), held, &out)
        });
        x.add(&summed(attended, &ranks[0], &out));
        let normed = norm(
            &x,
            &ranks[0],
            &of(if is_gpt2 {
                "ln_2"
            } else {
                "post_attention_layernorm"
            }),
        );
        let down = of(if is_gpt2 {
            "mlp.c_proj"
        } else {
            "mlp.down_proj"
        });
        let computed = ranks.iter().map(|held| {
            let inner = if is_gpt2 {
                outputs(&normed, held, &of("mlp.c_fc")).map(f64::tanh)
            } else if held.contains_key(&of("mlp.gate_up_proj.weight")) {
                let both = linear(&normed, held, &of("mlp.gate_up_proj"));
                let half = both.columns / 2;
                let (gate, up) = (
                    both.columns(&[half, half], 0).map(silu),
                    both.columns(&[half, half], 1),
                );
                Matrix {
                    at: gate.at.iter().zip(&up.at).map(|(a, b)| a * b).collect(),
                    ..gate
                }
            } else {
                let (gate, up) = (
                    linear(&normed, held, &of("mlp.gate_proj")),
                    linear(&normed, held, &of("mlp.up_proj")),
                );
                Matrix {
                    at: gate
                        .at
                        .iter()
                        .zip(&up.at)
                        .map(|(&a, b)| silu(a) * b)
                        .collect(),
                    ..gate
                }
            };
            linear(&inner, held, &down)
        });
        x.add(&summed(computed, &ranks[0], &down));
    }
    let x = norm(&x, &ranks[0], if is_gpt2 { "ln_f" } else { "model.norm" });
    let name = model.logits.strip_suffix(".weight").unwrap();
    // The ranks' logits follow each other.
    let parts: Vec<Matrix> = ranks.iter().map(|held| linear(&x, held, name)).collect();
    (0..x.rows)
        .flat_map(|row| parts.iter().flat_map(move |part| part.row(row).to_vec()))
        .collect()
}
