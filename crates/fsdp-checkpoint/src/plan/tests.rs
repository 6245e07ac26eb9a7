//! Plans of the save of a large mixture of experts on many ranks: ranks send little data, and the
//! plan is the right one.

use fsdp_formats::metadata::{Entry, decode, encode};
use fsdp_formats::plan::{plan_save, validate_metadata};
use fsdp_layout::boxes::boxes_of_flat_range;
use fsdp_layout::shard::chunk_range;
use fsdp_layout::{DType, KeyPath, PathPart, TensorBox};

use super::*;
use crate::rounds::ROUND_BYTES;

/// The size of a mixture of experts. Its units are its layers, each a list of parameters.
struct Model {
    layers: usize,
    experts: usize,
}

impl Model {
    /// Lists the keys and shapes of each unit.
    fn units(&self) -> Vec<Vec<(String, Vec<usize>)>> {
        let layer = |layer: usize| {
            let experts = (0..self.experts).flat_map(move |expert| {
                let projections = [
                    ("gate_proj", [1408, 2048]),
                    ("up_proj", [1408, 2048]),
                    ("down_proj", [2048, 1408]),
                ];
                projections.map(|(projection, shape)| {
                    (
                        format!("model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"),
                        shape.to_vec(),
                    )
                })
            });
            let norm = (
                format!("model.layers.{layer}.input_layernorm.weight"),
                vec![2048],
            );
            experts.chain([norm]).collect()
        };
        (0..self.layers).map(layer).collect()
    }

    /// Returns the plan of a rank that holds no boxes of the parameters yet. Each parameter also
    /// has a step, which all ranks hold.
    fn replicated(&self) -> LocalPlan {
        let mut plan = LocalPlan::default();
        for (name, shape) in self.units().into_iter().flatten() {
            let path = |name: &str| {
                Some(KeyPath(
                    name.split('.')
                        .map(|part| PathPart::Key(part.to_owned()))
                        .collect(),
                ))
            };
            plan.add_tensor(&name, path(&name), DType::BF16, shape, Vec::new());
            let step = format!("optim.state.{name}.step");
            plan.add_whole_tensor(&step, path(&step), DType::F32, vec![]);
        }
        plan.add_whole_tensor("empty", None, DType::F32, vec![0, 4]);
        plan.add_value("train.epoch", None, 700);
        plan
    }

    /// Gives a plan the boxes that a rank holds: its equal part of each unit, which is flattened as
    /// a whole.
    fn shard(
        &self,
        plan: &mut LocalPlan,
        units: &[Vec<(String, Vec<usize>)>],
        rank: usize,
        ranks: usize,
    ) {
        let mut item = 0;
        for unit in units {
            let numel = unit
                .iter()
                .map(|(_, shape)| shape.iter().product::<usize>())
                .sum();
            let own = chunk_range(numel, ranks, rank);
            let mut start = 0;
            for (_, shape) in unit {
                let end = start + shape.iter().product::<usize>();
                let part = own.start.clamp(start, end) - start..own.end.clamp(start, end) - start;
                if let WriteContent::Tensor { boxes, .. } = &mut plan.items[item].content {
                    *boxes = boxes_of_flat_range(shape, part);
                }
                (item, start) = (item + 2, end);
            }
        }
    }
}

/// Does what `plan_anew` does, without a group: returns the plan, and the bytes that each rank
/// sends.
fn plan(model: &Model, ranks: usize) -> (GlobalPlan, Vec<u64>) {
    let units = model.units();
    let mut local = model.replicated();
    let mut hashes: Vec<PlanHashes> = Vec::new();
    let (mut all, mut sent) = (Vec::new(), Vec::new());
    for rank in 0..ranks {
        model.shard(&mut local, &units, rank, ranks);
        // Equal on all ranks, whatever they hold; hashing takes the longest, so many ranks have it
        // from another.
        let known = hashes
            .first()
            .filter(|_| rank % 64 != 63)
            .map(|first| first.schema);
        // No two ranks hold the same.
        hashes.push(PlanHashes {
            layout: rank as u128,
            schema: known.unwrap_or_else(|| local.schema_hash()),
        });
        let own = pieces_to_send(&local, &hashes, rank);
        sent.push(own.iter().map(wire_bytes).sum());
        all.push(own);
    }
    (
        plan_pieces(&hashes, all, Deduplicate::Balanced).unwrap(),
        sent,
    )
}

#[test]
fn twenty_nine_thousand_parameters_on_a_thousand_ranks_are_planned_within_a_round() {
    const RANKS: usize = 1024;
    let model = Model {
        layers: 60,
        experts: 161,
    };
    let parameters: usize = model.units().iter().map(Vec::len).sum();
    assert!(parameters >= 29_000);
    let (
        GlobalPlan {
            metadata,
            selections,
            ..
        },
        sent,
    ) = plan(&model, RANKS);
    // Rank 0 sends the keys of all; any other rank only what it holds: a few boxes of each layer.
    assert!(sent[0] < 32 << 20, "{}", sent[0]);
    let most = sent[1..].iter().max().copied().unwrap();
    assert!(most < 64 << 10, "{most}");
    let total: u64 = sent.iter().sum();
    assert!(total < ROUND_BYTES, "{total}");

    validate_metadata(&metadata).unwrap();
    assert_eq!(metadata.entries.len(), 2 * parameters + 2);
    assert!(matches!(&metadata.entries["empty"], Entry::Tensor(empty) if empty.chunks.is_empty()));
    let chunks: usize = metadata
        .tensors()
        .map(|(_, tensor)| tensor.chunks.len())
        .sum::<usize>()
        + 1;
    assert_eq!(
        selections
            .iter()
            .map(|selection| selection.kept.len())
            .sum::<usize>(),
        chunks
    );
    // The metadata file can be written and read.
    let bytes = encode(&metadata);
    assert!(bytes.len() < 256 << 20, "{}", bytes.len());
    let directory = tempfile::tempdir().unwrap();
    let staging = fsdp_formats::storage::Durable::new()
        .prepare(directory.path().join("step"), false)
        .unwrap();
    staging
        .commit(fsdp_formats::metadata::METADATA_FILE, &bytes)
        .unwrap();
    let read = decode(&std::fs::read(directory.path().join("step/.metadata")).unwrap()).unwrap();
    assert_eq!(read.entries.len(), metadata.entries.len());
}

/// The plan that is made of the pieces that ranks send is equal to the plan that is made of all
/// ranks' whole plans.
#[test]
fn pieces_make_the_plan_that_whole_plans_make() {
    let model = Model {
        layers: 2,
        experts: 3,
    };
    for ranks in [1, 2, 7] {
        let units = model.units();
        let plans: Vec<LocalPlan> = (0..ranks)
            .map(|rank| {
                let mut plan = model.replicated();
                model.shard(&mut plan, &units, rank, ranks);
                plan
            })
            .collect();
        let whole = plan_save(&plans, Deduplicate::default()).unwrap();
        assert_eq!(plan(&model, ranks).0, whole);
    }
}

/// All ranks know the key of the tensor `lost`, but none holds a box of it. It must be an error,
/// and not be left out.
#[test]
fn a_tensor_that_no_rank_holds_a_box_of_is_an_error_that_names_it() {
    let mut local = LocalPlan::default();
    local.add_tensor(
        "held",
        None,
        DType::F32,
        vec![2],
        vec![TensorBox::whole(&[2])],
    );
    local.add_tensor("lost", None, DType::F32, vec![2], Vec::new());
    let hash = || PlanHashes {
        layout: local.layout_hash(),
        schema: local.schema_hash(),
    };
    let hashes = [hash(), hash()];
    let all = (0..2)
        .map(|rank| pieces_to_send(&local, &hashes, rank))
        .collect();
    let error = plan_pieces(&hashes, all, Deduplicate::Balanced).unwrap_err();
    assert!(error.to_string().contains("`lost`"), "{error}");
}

/// Replicas of a shard send no pieces to the planner, and each of them writes some of the bytes.
#[test]
fn a_replica_sends_nothing_and_the_plan_is_that_of_whole_plans() {
    const SHARDS: usize = 3;
    let model = Model {
        layers: 2,
        experts: 3,
    };
    let units = model.units();
    let plans: Vec<LocalPlan> = (0..3 * SHARDS)
        .map(|rank| {
            let mut plan = model.replicated();
            model.shard(&mut plan, &units, rank % SHARDS, SHARDS);
            plan
        })
        .collect();
    let hash = |plan: &LocalPlan| PlanHashes {
        layout: plan.layout_hash(),
        schema: plan.schema_hash(),
    };
    let hashes: Vec<PlanHashes> = plans.iter().map(hash).collect();
    let sent: Vec<_> = plans
        .iter()
        .enumerate()
        .map(|(rank, plan)| pieces_to_send(plan, &hashes, rank))
        .collect();
    assert!(sent[..SHARDS].iter().all(|pieces| !pieces.is_empty()));
    assert!(sent[SHARDS..].iter().all(Vec::is_empty));
    let planned = plan_pieces(&hashes, sent, Deduplicate::Balanced).unwrap();
    assert_eq!(planned, plan_save(&plans, Deduplicate::default()).unwrap());
    assert!(
        planned
            .selections
            .iter()
            .all(|selection| !selection.kept.is_empty())
    );
}
