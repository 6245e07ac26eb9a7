//! The names and shapes of published models.

/// A parameter: its name and its shape.
pub(super) type Parameter = (String, Vec<usize>);

/// The sizes of a model of Llama's architecture.
#[derive(Clone, Copy)]
struct Llama {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_width: usize,
    vocab: usize,
    /// `true` if the output layer is the embedding.
    is_tied: bool,
    /// The number of experts of a layer; 0 for one dense layer.
    experts: usize,
}

/// Llama 3.1 8B; the other dense models differ from it in some sizes.
const LLAMA_8B: Llama = Llama {
    layers: 32,
    hidden: 4096,
    intermediate: 14_336,
    heads: 32,
    kv_heads: 8,
    head_width: 128,
    vocab: 128_256,
    is_tied: false,
    experts: 0,
};

/// The vocabulary and the longest text of GPT-2.
const GPT2_VOCAB: usize = 50_257;
const GPT2_POSITIONS: usize = 1024;

/// Lists the parameters of a model by unit: one for those that are in no layer, and one for each
/// layer.
type ListUnits = fn() -> Vec<Vec<Parameter>>;

/// All models that `--model` takes, by their names.
pub(super) const MODELS: [(&str, ListUnits); 11] = [
    ("gpt2-124m", || gpt2_units(12, 768)),
    ("gpt2-355m", || gpt2_units(24, 1024)),
    ("gpt2-774m", || gpt2_units(36, 1280)),
    ("gpt2-1.5b", || gpt2_units(48, 1600)),
    ("llama-1b", || {
        Llama {
            layers: 16,
            hidden: 2048,
            intermediate: 8192,
            head_width: 64,
            is_tied: true,
            ..LLAMA_8B
        }
        .units()
    }),
    ("llama-3b", || {
        Llama {
            layers: 28,
            hidden: 3072,
            intermediate: 8192,
            heads: 24,
            is_tied: true,
            ..LLAMA_8B
        }
        .units()
    }),
    ("llama-8b", || LLAMA_8B.units()),
    ("llama-70b", || {
        Llama {
            layers: 80,
            hidden: 8192,
            intermediate: 28_672,
            heads: 64,
            ..LLAMA_8B
        }
        .units()
    }),
    ("llama-405b", || {
        Llama {
            layers: 126,
            hidden: 16_384,
            intermediate: 53_248,
            heads: 128,
            ..LLAMA_8B
        }
        .units()
    }),
    ("mistral-7b", || {
        Llama {
            vocab: 32_000,
            ..LLAMA_8B
        }
        .units()
    }),
    ("mixtral-8x7b", || {
        Llama {
            vocab: 32_000,
            experts: 8,
            ..LLAMA_8B
        }
        .units()
    }),
];

/// Returns the units of the model of this name; `None` if it is none of [`MODELS`].
pub(super) fn find_units(name: &str) -> Option<Vec<Vec<Parameter>>> {
    let (_, units) = MODELS.iter().find(|(model, _)| *model == name)?;
    Some(units())
}

impl Llama {
    /// Returns the parameters: those of the root, then those of each layer.
    fn units(&self) -> Vec<Vec<Parameter>> {
        // The embedding and the last norm are in no layer: FSDP shards them with the root unit.
        let mut root = vec![
            (
                "model.embed_tokens.weight".to_owned(),
                vec![self.vocab, self.hidden],
            ),
            ("model.norm.weight".to_owned(), vec![self.hidden]),
        ];
        // A tied output layer is the embedding under a second name, and has no bytes of its own.
        if !self.is_tied {
            root.push(("lm_head.weight".to_owned(), vec![self.vocab, self.hidden]));
        }
        std::iter::once(root)
            .chain((0..self.layers).map(|layer| self.layer_parameters(layer)))
            .collect()
    }

    /// Returns the parameters of one layer, by Hugging Face's names.
    fn layer_parameters(&self, layer: usize) -> Vec<Parameter> {
        let hidden = self.hidden;
        let intermediate = self.intermediate;
        let query_width = self.heads * self.head_width;
        let key_width = self.kv_heads * self.head_width;
        let mut weights = vec![
            ("self_attn.q_proj".to_owned(), vec![query_width, hidden]),
            ("self_attn.k_proj".to_owned(), vec![key_width, hidden]),
            ("self_attn.v_proj".to_owned(), vec![key_width, hidden]),
            ("self_attn.o_proj".to_owned(), vec![hidden, query_width]),
        ];
        // A mixture of experts has a router in place of the dense layer, and an MLP for each
        // expert.
        if self.experts == 0 {
            weights.push(("mlp.gate_proj".to_owned(), vec![intermediate, hidden]));
            weights.push(("mlp.up_proj".to_owned(), vec![intermediate, hidden]));
            weights.push(("mlp.down_proj".to_owned(), vec![hidden, intermediate]));
        } else {
            weights.push((
                "block_sparse_moe.gate".to_owned(),
                vec![self.experts, hidden],
            ));
        }
        for expert in 0..self.experts {
            for (name, shape) in [
                ("w1", [intermediate, hidden]),
                ("w2", [hidden, intermediate]),
                ("w3", [intermediate, hidden]),
            ] {
                weights.push((
                    format!("block_sparse_moe.experts.{expert}.{name}"),
                    shape.to_vec(),
                ));
            }
        }
        weights.push(("input_layernorm".to_owned(), vec![hidden]));
        weights.push(("post_attention_layernorm".to_owned(), vec![hidden]));
        // All of them are weights of a layer, under Hugging Face's prefix.
        weights
            .into_iter()
            .map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape))
            .collect()
    }
}

/// Returns the parameters of a GPT-2: those of the root, then those of each block.
fn gpt2_units(layers: usize, hidden: usize) -> Vec<Vec<Parameter>> {
    let mut units = vec![vec![
        (
            "transformer.wte.weight".to_owned(),
            vec![GPT2_VOCAB, hidden],
        ),
        (
            "transformer.wpe.weight".to_owned(),
            vec![GPT2_POSITIONS, hidden],
        ),
        ("transformer.ln_f.weight".to_owned(), vec![hidden]),
        ("transformer.ln_f.bias".to_owned(), vec![hidden]),
    ]];
    for layer in 0..layers {
        let mut unit = Vec::new();
        // Linear layers of GPT-2 have their weights the other way round: inputs, then outputs.
        for (name, weight) in [
            ("ln_1", vec![hidden]),
            ("attn.c_attn", vec![hidden, 3 * hidden]),
            ("attn.c_proj", vec![hidden, hidden]),
            ("ln_2", vec![hidden]),
            ("mlp.c_fc", vec![hidden, 4 * hidden]),
            ("mlp.c_proj", vec![4 * hidden, hidden]),
        ] {
            let name = format!("transformer.h.{layer}.{name}");
            // Every weight of GPT-2 has a bias, of the size of its outputs: the last dimension.
            let bias = weight[weight.len() - 1];
            unit.push((format!("{name}.weight"), weight));
            unit.push((format!("{name}.bias"), vec![bias]));
        }
        units.push(unit);
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counts are those that the models' pages on the Hugging Face hub give for their files.
    #[test]
    fn models_have_as_many_parameters_as_the_published_models() {
        let published: [(&str, u64); 11] = [
            ("gpt2-124m", 124_439_808),
            ("gpt2-355m", 354_823_168),
            ("gpt2-774m", 774_030_080),
            ("gpt2-1.5b", 1_557_611_200),
            ("llama-1b", 1_235_814_400),
            ("llama-3b", 3_212_749_824),
            ("llama-8b", 8_030_261_248),
            ("llama-70b", 70_553_706_496),
            ("llama-405b", 405_853_388_800),
            ("mistral-7b", 7_241_732_096),
            ("mixtral-8x7b", 46_702_792_704),
        ];
        let ours: Vec<(&str, u64)> = MODELS
            .iter()
            .map(|(name, units)| {
                let parameters = units().into_iter().flatten();
                (
                    *name,
                    parameters
                        .map(|(_, shape)| shape.iter().product::<usize>() as u64)
                        .sum(),
                )
            })
            .collect();
        assert_eq!(ours, published);
    }

    #[test]
    fn names_are_unique_and_each_layer_is_a_unit() {
        for (model, units) in MODELS {
            let units = units();
            let mut names: Vec<String> = units
                .iter()
                .flatten()
                .map(|(name, _)| name.clone())
                .collect();
            let all = names.len();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), all, "{model}");
            assert!(units.len() > 12);
        }
        assert!(find_units("llama-9b").is_none());
    }
}
