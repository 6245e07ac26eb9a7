//! Plans: the ranges of every tensor that each rank holds.

use std::collections::{HashMap, HashSet};

use fsdp_formats::metadata::Metadata;
use fsdp_layout::count_text;
use indexmap::IndexMap;

use super::error::TensorParallelError;
use super::rule::{CutRule, Heads, How, KV_HEADS, Parts, Rules, layer_name};

/// The multiple to which the size of a vocabulary is rounded up before it is divided over the
/// ranks, as in vLLM.
const VOCAB_MULTIPLE: usize = 64;

/// A plan for tensor-parallel ranks: how each tensor of a checkpoint is cut.
#[derive(Debug, Clone)]
pub struct TensorParallelPlan {
    ranks: usize,
    cuts: IndexMap<String, Cut>,
}

/// The way in which one tensor is cut.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Cut {
    /// The rule's way of cutting, such as `colwise(heads)`.
    pub how: String,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The dimension that is cut. The others are whole.
    pub(crate) dim: usize,
    shares: Vec<Share>,
}

/// A range of a dimension that is divided over the ranks by itself, such as the rows of the queries
/// in a fused weight.
#[derive(Debug, Clone, Copy)]
struct Share {
    start: usize,
    len: usize,
    /// The number of consecutive ranks that hold the same indices.
    copies: usize,
    /// The number of indices per rank; the last ranks may have fewer, or none.
    len_per_rank: usize,
}

/// Indices of a dimension that a rank holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SliceRange {
    /// The first index.
    pub(crate) start: usize,
    /// The number of indices.
    pub(crate) len: usize,
    /// `true` if no rank with a lower number holds these indices too.
    pub(crate) is_first: bool,
}

impl TensorParallelPlan {
    /// Applies rules to all tensors of a checkpoint.
    ///
    /// Norms and scalars that no rule matches are whole on every rank. A norm in a module with
    /// layers that a given rule cuts needs a rule of its own, because it may be a norm of what is
    /// cut.
    ///
    /// # Errors
    /// [`TensorParallelError::Unknown`] for other tensors that no rule matches,
    /// [`TensorParallelError::Tensor`] for one that cannot be cut over this number of ranks,
    /// [`TensorParallelError::NoValue`], and [`TensorParallelError::Unused`] for a rule that was
    /// given and matches nothing.
    pub fn new(
        metadata: &Metadata,
        rules: &Rules,
        ranks: usize,
    ) -> Result<Self, TensorParallelError> {
        let mut planner = Planner {
            rules,
            metadata,
            ranks: ranks.max(1),
            head_sizes: HashMap::new(),
        };
        let cut_modules: HashSet<&str> = metadata
            .tensors()
            .map(|(fqn, _)| fqn)
            .filter(|fqn| rules.is_cut_by_given(fqn))
            .map(module_of)
            .collect();
        // Find all tensors without a rule before one is reported, to count them.
        let mut cuts = IndexMap::new();
        let mut unknown_tensors = Vec::new();
        let mut used_positions = HashSet::new();
        for (fqn, tensor) in metadata.tensors() {
            match rules.find(fqn) {
                Some((position, rule)) => {
                    used_positions.insert(position);
                    let cut = planner.cut(&RuledTensor {
                        fqn,
                        shape: &tensor.shape,
                        rule,
                        ranks: planner.ranks,
                    })?;
                    cuts.insert(fqn.to_owned(), cut);
                }
                None if is_scalar_or_norm(fqn, &tensor.shape)
                    && !cut_modules.contains(module_of(fqn)) =>
                {
                    cuts.insert(fqn.to_owned(), Cut::whole(&tensor.shape, planner.ranks));
                }
                None => unknown_tensors.push((fqn, tensor)),
            }
        }
        if let [(fqn, tensor), more_tensors @ ..] = &unknown_tensors[..] {
            return Err(TensorParallelError::Unknown {
                fqn: (*fqn).to_owned(),
                shape: tensor.shape.clone(),
                more: more_tensors.len(),
            });
        }
        if let Some((_, rule)) = rules
            .given()
            .find(|(position, _)| !used_positions.contains(position))
        {
            return Err(TensorParallelError::Unused {
                rule: rule.text.clone(),
            });
        }
        Ok(TensorParallelPlan {
            ranks: planner.ranks,
            cuts,
        })
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns all tensors in the order of the checkpoint: the key, and how the tensor is cut.
    pub fn cuts(&self) -> impl Iterator<Item = (&str, &Cut)> {
        self.cuts.iter().map(|(fqn, cut)| (fqn.as_str(), cut))
    }

    /// Returns how the tensor with this key is cut; `None` if the plan does not have it.
    #[must_use]
    pub fn cut(&self, fqn: &str) -> Option<&Cut> {
        self.cuts.get(fqn)
    }
}

impl Cut {
    /// Makes the cut of a tensor that is whole on every rank.
    fn whole(shape: &[usize], ranks: usize) -> Self {
        Cut {
            how: "replicate".to_owned(),
            shape: shape.to_vec(),
            dim: 0,
            // A tensor without dimensions has nothing to share.
            shares: shape
                .iter()
                .take(1)
                .map(|&len| Share {
                    start: 0,
                    len,
                    copies: ranks,
                    len_per_rank: len,
                })
                .collect(),
        }
    }

    /// Returns the ranges of indices of the dimension that a rank holds, one after the other. A
    /// tensor without dimensions has none, and is whole.
    pub(crate) fn ranges(&self, rank: usize) -> Vec<SliceRange> {
        self.shares.iter().map(|share| share.range(rank)).collect()
    }

    /// Returns the shape of the part that a rank holds.
    #[must_use]
    pub fn shape_of(&self, rank: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(size) = shape.get_mut(self.dim) {
            *size = self.shares.iter().map(|share| share.range(rank).len).sum();
        }
        shape
    }
}

impl Share {
    /// Returns the range of a rank. Consecutive ranks may have copies of the same range.
    fn range(&self, rank: usize) -> SliceRange {
        // The last ranks may have nothing, where a vocabulary was padded.
        let start = (rank / self.copies * self.len_per_rank).min(self.len);
        let len = self.len_per_rank.min(self.len - start);
        SliceRange {
            start: self.start + start,
            len,
            is_first: rank.is_multiple_of(self.copies),
        }
    }
}

/// Returns the module that a tensor's layer belongs to: `a.mixer` for `a.mixer.in_proj.weight`, and
/// the empty text for the root.
fn module_of(fqn: &str) -> &str {
    let layer = layer_name(fqn).unwrap_or(fqn);
    layer.rsplit_once('.').map_or("", |(module, _)| module)
}

/// Returns `true` for a tensor that is whole on every rank without a rule: a scalar, or the weight
/// or bias of a norm.
fn is_scalar_or_norm(fqn: &str, shape: &[usize]) -> bool {
    let Some(layer) = layer_name(fqn) else {
        return shape.is_empty();
    };
    let name = layer.rsplit_once('.').map_or(layer, |(_, name)| name);
    let is_norm = name.contains("norm") || name == "ln" || name.starts_with("ln_");
    shape.is_empty() || (shape.len() == 1 && is_norm)
}

/// A tensor, and the rule by which it is cut over this number of ranks.
struct RuledTensor<'t> {
    fqn: &'t str,
    shape: &'t [usize],
    rule: &'t CutRule,
    ranks: usize,
}

impl RuledTensor<'_> {
    /// Returns the error that the rule cannot cut the tensor.
    fn error(&self, reason: impl Into<String>) -> TensorParallelError {
        TensorParallelError::Tensor {
            fqn: self.fqn.to_owned(),
            shape: self.shape.to_vec(),
            ranks: self.ranks,
            rule: self.rule.text.clone(),
            reason: reason.into(),
        }
    }
}

/// The state of making a plan.
struct Planner<'r> {
    rules: &'r Rules,
    metadata: &'r Metadata,
    ranks: usize,
    /// For each attention module, the size of a head and the first tensor that had it.
    head_sizes: HashMap<String, (usize, String)>,
}

impl Planner<'_> {
    /// Applies a rule to a tensor, and returns how it is cut.
    ///
    /// # Errors
    /// [`TensorParallelError::Tensor`] for a shape that the rule does not fit, or that this number
    /// of ranks cannot divide.
    fn cut(&mut self, tensor: &RuledTensor<'_>) -> Result<Cut, TensorParallelError> {
        let RuledTensor {
            fqn,
            shape,
            rule,
            ranks,
        } = *tensor;
        if rule.how == How::Replicate {
            return Ok(Cut::whole(shape, ranks));
        }
        // A layer has a matrix and perhaps a bias.
        let is_vector = match shape.len() {
            1 => true,
            2 => false,
            dimensions => {
                return Err(tensor.error(format!(
                    "it has {dimensions} dimensions, where a layer's have 1 or 2"
                )));
            }
        };
        if !is_vector
            && let How::Outputs { is_conv1d, .. } | How::Inputs { is_conv1d, .. } = rule.how
        {
            self.check_bias(fqn, shape, is_conv1d)
                .map_err(|reason| tensor.error(reason))?;
        }
        let (dim, parts) = match &rule.how {
            How::Outputs { parts, is_conv1d } => {
                (usize::from(*is_conv1d && !is_vector), Some(parts))
            }
            // Every rank holds the whole bias, because it is added once, after the sum over the
            // ranks.
            How::Inputs { .. } if is_vector && fqn.ends_with(".bias") => {
                return Ok(Cut::whole(shape, ranks));
            }
            How::Inputs { .. } if is_vector => {
                return Err(tensor
                    .error("it is a vector and no bias: `colwise` cuts it, `replicate` does not"));
            }
            How::Inputs { parts, is_conv1d } => (usize::from(!is_conv1d), Some(parts)),
            How::Vocab | How::Replicate => (0, None),
        };
        // Divide the dimension: each part of it by itself, so that every rank has its share of
        // each.
        let size = shape[dim];
        let shares = match parts {
            None => divide_vocabulary(size, ranks).map(|share| vec![share]),
            Some(Parts::Equal(count)) => divide_equally(size, *count, ranks),
            Some(Parts::Heads(heads)) => {
                let part_count = heads.len();
                // The outputs of a Conv1D are its columns.
                if let How::Outputs {
                    is_conv1d: true, ..
                } = rule.how
                    && part_count > 1
                    && !is_vector
                    && shape[0].checked_mul(part_count) != Some(size)
                {
                    return Err(tensor.error(format!(
                        "a Conv1D of {part_count} parts has {part_count} times as many columns as rows"
                    )));
                }
                let mut counts = Vec::new();
                for heads in heads {
                    counts.push(self.head_count(heads, tensor)?);
                }
                divide_by_heads(size, &counts, ranks).and_then(|(shares, head_size)| {
                    self.check_head_size(fqn, head_size)?;
                    Ok(shares)
                })
            }
        };
        Ok(Cut {
            how: rule.how_text.clone(),
            shape: shape.to_vec(),
            dim,
            shares: shares.map_err(|reason| tensor.error(reason))?,
        })
    }

    /// Checks that a weight has as many outputs as the bias of its layer has elements. This detects
    /// a rule for weights `[in, out]` that matches a weight `[out, in]`, and the other way round.
    fn check_bias(&self, fqn: &str, shape: &[usize], is_conv1d: bool) -> Result<(), String> {
        let Some(layer) = fqn.strip_suffix(".weight") else {
            return Ok(());
        };
        let outputs = shape[usize::from(is_conv1d)];
        match self.metadata.tensor(&format!("{layer}.bias")) {
            Some(bias) if bias.shape != [outputs] => Err(format!(
                "by the rule it has {outputs} outputs, but its bias has shape {:?}: give a rule for this layer",
                bias.shape
            )),
            // A Conv1D of `transformers` always has a bias.
            None if is_conv1d => Err(
                "a Conv1D has a bias, and this layer has none: give a rule for a linear layer"
                    .to_owned(),
            ),
            _ => Ok(()),
        }
    }

    /// Returns a number of heads, and `true` if it may be lower than the number of ranks.
    ///
    /// # Errors
    /// [`TensorParallelError::NoValue`] for a name that the rules give no number.
    fn head_count(
        &self,
        heads: &Heads,
        tensor: &RuledTensor<'_>,
    ) -> Result<(usize, bool), TensorParallelError> {
        match heads {
            Heads::Number(count) => Ok((*count, false)),
            Heads::Name(name) => match self.rules.values.get(name) {
                Some(count) => Ok((*count, name == KV_HEADS)),
                None => Err(TensorParallelError::NoValue {
                    rule: tensor.rule.text.clone(),
                    fqn: tensor.fqn.to_owned(),
                    name: name.clone(),
                }),
            },
        }
    }

    /// Checks that the heads in all layers of a module have the same size. This detects a wrong
    /// number of heads.
    fn check_head_size(&mut self, fqn: &str, head_size: usize) -> Result<(), String> {
        let (size, first_fqn) = self
            .head_sizes
            .entry(module_of(fqn).to_owned())
            .or_insert_with(|| (head_size, fqn.to_owned()));
        if *size == head_size {
            return Ok(());
        }
        Err(format!(
            "its heads would have size {head_size}, but those of `{first_fqn}` have {size}: is the number of heads right?"
        ))
    }
}

/// Returns the share of a vocabulary, which is divided as if it were padded to a multiple of
/// [`VOCAB_MULTIPLE`]. The padding itself is not written.
fn divide_vocabulary(size: usize, ranks: usize) -> Result<Share, String> {
    let padded_size = size
        .checked_next_multiple_of(VOCAB_MULTIPLE)
        .filter(|padded_size| padded_size.is_multiple_of(ranks))
        .ok_or_else(|| {
            format!(
                "{size}, rounded up to a multiple of {VOCAB_MULTIPLE}, is not a multiple of {ranks}"
            )
        })?;
    Ok(Share {
        start: 0,
        len: size,
        copies: 1,
        len_per_rank: padded_size / ranks,
    })
}

/// Returns the shares of a dimension of `part_count` equal parts, each of which is divided by
/// itself.
fn divide_equally(size: usize, part_count: usize, ranks: usize) -> Result<Vec<Share>, String> {
    if !size.is_multiple_of(part_count) || !(size / part_count).is_multiple_of(ranks) {
        let of_parts = if part_count == 1 {
            String::new()
        } else {
            format!(" of {part_count} parts")
        };
        let verb = if size == 1 { "is" } else { "are" };
        return Err(format!(
            "{}{of_parts} {verb} not a multiple of {ranks}",
            count_text(size, "index", "indices")
        ));
    }
    let len = size / part_count;
    Ok((0..part_count)
        .map(|part| Share {
            start: part * len,
            len,
            copies: 1,
            len_per_rank: len / ranks,
        })
        .collect())
}

/// Returns the shares of a dimension that holds several kinds of heads, such as those of queries,
/// keys and values, one kind after the other, and the size of a head. Each kind is divided among
/// all ranks by itself. `counts` has the number of heads of each kind, and `true` for kinds whose
/// heads may be repeated on several ranks where there are fewer of them than ranks.
fn divide_by_heads(
    size: usize,
    counts: &[(usize, bool)],
    ranks: usize,
) -> Result<(Vec<Share>, usize), String> {
    let head_size = counts
        .iter()
        .try_fold(0usize, |sum, &(count, _)| sum.checked_add(count))
        .filter(|&head_count| head_count > 0 && size.is_multiple_of(head_count))
        .map(|head_count| size / head_count)
        .ok_or_else(|| {
            let counts: Vec<String> = counts.iter().map(|(count, _)| count.to_string()).collect();
            let head_word = if counts == ["1"] { "head" } else { "heads" };
            format!("{size} indices are not {} {head_word}", counts.join(" + "))
        })?;
    let mut shares = Vec::new();
    let mut start = 0;
    for &(count, may_repeat) in counts {
        // Where there are fewer heads than ranks, several ranks hold the same head.
        let copies = if count.is_multiple_of(ranks) && count > 0 {
            1
        } else if may_repeat && count > 0 && ranks.is_multiple_of(count) {
            ranks / count
        } else if may_repeat {
            return Err(format!(
                "of {count} heads of keys and values and {ranks} ranks, neither is a multiple of the other"
            ));
        } else {
            let heads = count_text(count, "head is", "heads are");
            return Err(format!("{heads} not a multiple of {ranks}"));
        };
        let len = count * head_size;
        shares.push(Share {
            start,
            len,
            copies,
            len_per_rank: len / (ranks / copies),
        });
        start += len;
    }
    Ok((shares, head_size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fsdp_formats::metadata::{Entry, TensorEntry, TensorProperties};

    /// Plans tensors of these shapes, with 8 heads, of which 2 are of keys and values.
    fn plan(
        tensors: &[(&str, &[usize])],
        given: &[&str],
        ranks: usize,
    ) -> Result<TensorParallelPlan, TensorParallelError> {
        let values = [("heads".to_owned(), 8), ("kv_heads".to_owned(), 2)].into();
        let mut metadata = Metadata::default();
        for (fqn, shape) in tensors {
            let properties = TensorProperties::new(fsdp_layout::DType::F32);
            let entry = TensorEntry {
                properties,
                shape: shape.to_vec(),
                chunks: Vec::new(),
            };
            metadata
                .entries
                .insert((*fqn).to_owned(), Entry::Tensor(entry));
        }
        TensorParallelPlan::new(&metadata, &Rules::new(given, values)?, ranks)
    }

    /// Returns the ranges `(start, len)` of a rank.
    fn ranges(plan: &TensorParallelPlan, fqn: &str, rank: usize) -> (usize, Vec<(usize, usize)>) {
        let cut = plan.cut(fqn).unwrap();
        (
            cut.dim,
            cut.ranges(rank)
                .iter()
                .map(|range| (range.start, range.len))
                .collect(),
        )
    }

    #[test]
    fn heads_of_keys_and_values_are_on_several_ranks_where_there_are_fewer() {
        let tensors: &[(&str, &[usize])] = &[
            ("l.self_attn.q_proj.weight", &[32, 16]),
            ("l.self_attn.k_proj.weight", &[8, 16]),
            ("l.self_attn.k_proj.bias", &[8]),
            ("l.self_attn.o_proj.weight", &[16, 32]),
            ("l.self_attn.o_proj.bias", &[16]),
            ("m.self_attn.qkv_proj.weight", &[48, 16]),
        ];
        let plan = plan(tensors, &[], 4).unwrap();
        for rank in 0..4 {
            assert_eq!(
                ranges(&plan, "l.self_attn.q_proj.weight", rank),
                (0, vec![(8 * rank, 8)])
            );
            assert_eq!(
                ranges(&plan, "l.self_attn.k_proj.weight", rank),
                (0, vec![(rank / 2 * 4, 4)])
            );
            assert_eq!(
                ranges(&plan, "l.self_attn.k_proj.bias", rank),
                (0, vec![(rank / 2 * 4, 4)])
            );
            assert_eq!(
                ranges(&plan, "l.self_attn.o_proj.weight", rank),
                (1, vec![(8 * rank, 8)])
            );
            assert_eq!(
                ranges(&plan, "l.self_attn.o_proj.bias", rank),
                (0, vec![(0, 16)])
            );
            let (q, k) = (8 * rank, 32 + rank / 2 * 4);
            assert_eq!(
                ranges(&plan, "m.self_attn.qkv_proj.weight", rank),
                (0, vec![(q, 8), (k, 4), (k + 8, 4)])
            );
            let first = |fqn: &str| plan.cut(fqn).unwrap().ranges(rank)[0].is_first;
            assert!(first("l.self_attn.q_proj.weight"));
            assert_eq!(first("l.self_attn.k_proj.weight"), rank % 2 == 0);
            assert_eq!(first("l.self_attn.o_proj.bias"), rank == 0);
        }
    }

    #[test]
    fn vocabularies_are_filled_up_and_what_is_filled_in_is_on_no_rank() {
        let tensors: &[(&str, &[usize])] =
            &[("embed_tokens.weight", &[100, 4]), ("lm_head.bias", &[10])];
        let plan = plan(tensors, &[], 4).unwrap();
        let first_ranges = |fqn| {
            (0..4)
                .map(|rank| ranges(&plan, fqn, rank).1[0])
                .collect::<Vec<_>>()
        };
        assert_eq!(
            first_ranges("embed_tokens.weight"),
            [(0, 32), (32, 32), (64, 32), (96, 4)]
        );
        assert_eq!(
            first_ranges("lm_head.bias"),
            [(0, 10), (10, 0), (10, 0), (10, 0)]
        );
        assert_eq!(plan.cut("embed_tokens.weight").unwrap().shape_of(3), [4, 4]);
    }

    #[test]
    fn what_does_not_fit_is_an_error_that_names_the_tensor() {
        let refused = |tensors: &[(&str, &[usize])], given: &[&str], ranks| {
            plan(tensors, given, ranks).unwrap_err().to_string()
        };
        for (fqn, shape, ranks, reason) in [
            (
                "a.self_attn.q_proj.weight",
                &[32, 16][..],
                3,
                "8 heads are not a multiple of 3",
            ),
            (
                "a.self_attn.q_proj.weight",
                &[30, 16],
                2,
                "30 indices are not 8 heads",
            ),
            (
                "a.self_attn.k_proj.weight",
                &[8, 16],
                3,
                "neither is a multiple of the other",
            ),
            (
                "a.mlp.gate_proj.weight",
                &[18, 16],
                4,
                "18 indices are not a multiple of 4",
            ),
            (
                "a.mlp.gate_up_proj.weight",
                &[12, 16],
                4,
                "12 indices of 2 parts are not a multiple of 4",
            ),
            (
                "a.mlp.down_proj.weight",
                &[16, 18],
                4,
                "18 indices are not a multiple of 4",
            ),
            (
                "embed_tokens.weight",
                &[100, 4],
                3,
                "is not a multiple of 3",
            ),
            ("a.mlp.experts.down_proj", &[2, 16, 16], 2, "3 dimensions"),
            ("h.0.mlp.c_fc.weight", &[8, 32], 2, "this layer has none"),
            (
                "encoder.layers.0.mlp.dense_h_to_4h.weight",
                &[64, 16],
                2,
                "no rule",
            ),
        ] {
            let error = refused(&[(fqn, shape)], &[], ranks);
            assert!(error.contains(fqn) && error.contains(reason), "{error}");
        }
        // GPT-Neo and others have linear layers under the names of GPT-2's.
        for (layer, shape, bias) in [
            ("h.0.attn.c_attn", [1536 * 3, 1536], 1536 * 3),
            ("h.0.mlp.c_fc", [32, 8], 32),
            ("h.0.mlp.c_proj", [8, 32], 8),
        ] {
            let (weight, bias_key) = (format!("{layer}.weight"), format!("{layer}.bias"));
            let error = refused(&[(&weight, &shape), (&bias_key, &[bias])], &[], 2);
            assert!(error.contains("but its bias has shape"), "{error}");
        }
        let square = [
            ("h.0.attn.c_attn.weight", &[16, 32][..]),
            ("h.0.attn.c_attn.bias", &[32]),
        ];
        assert!(refused(&square, &[], 2).contains("columns as rows"));
        // The scales of a layer's inputs are no bias.
        assert!(
            refused(&[("a.mixer.D", &[8])], &["mixer.D=rowwise"], 2).contains("`colwise` cuts it")
        );
        let gated: &[(&str, &[usize])] = &[
            ("a.mixer.in_proj.weight", &[8, 4]),
            ("a.mixer.norm.weight", &[8]),
        ];
        assert!(refused(gated, &["mixer.in_proj=colwise"], 2).contains("a.mixer.norm.weight"));
        assert!(plan(gated, &["mixer.in_proj=colwise", "mixer.norm=colwise"], 2).is_ok());
        let other_head: &[(&str, &[usize])] = &[
            ("a.self_attn.q_proj.weight", &[32, 4]),
            ("a.self_attn.k_proj.weight", &[4, 4]),
        ];
        assert!(refused(other_head, &[], 2).contains("is the number of heads right?"));
        // An unknown matrix, a vector that is no norm's, and what belongs to a layer but is neither
        // weight nor bias.
        for fqn in [
            "a.mixer.in_proj.weight",
            "a.mixer.A_log",
            "a.mlp.gate_proj.weight_scale",
        ] {
            assert!(refused(&[(fqn, &[4, 4])], &[], 2).contains(fqn));
            assert!(refused(&[(fqn, &[4])], &[], 2).contains("no rule"));
            assert!(plan(&[(fqn, &[4, 4])], &[&format!("{fqn}=colwise")], 2).is_ok());
        }
        assert!(
            plan(
                &[
                    ("a.input_layernorm.weight", &[4]),
                    ("ln_f.bias", &[4]),
                    ("scale", &[])
                ],
                &[],
                2
            )
            .is_ok()
        );
        assert!(refused(&[("a.norm.weight", &[4, 4])], &[], 2).contains("no rule"));
        assert!(refused(&[("a.norm.weight", &[4])], &["typo=colwise"], 2).contains("typo"));
        let unset = Rules::new(&["norm=colwise(groups)"], [].into()).unwrap();
        let mut metadata = Metadata::default();
        let properties = TensorProperties::new(fsdp_layout::DType::F32);
        let entry = TensorEntry {
            properties,
            shape: vec![4],
            chunks: Vec::new(),
        };
        metadata
            .entries
            .insert("norm.weight".to_owned(), Entry::Tensor(entry));
        let error = TensorParallelPlan::new(&metadata, &unset, 2).unwrap_err();
        assert!(matches!(error, TensorParallelError::NoValue { name, .. } if name == "groups"));
    }
}
