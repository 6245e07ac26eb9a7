//! Resuming into the memory of a model and a fresh optimizer gives what resuming through fresh tensors gives, and needs room
//! made for the state that was saved, no more.

use std::path::Path;

use fsdp_checkpoint::{
    LoadOptions, SaveOptions, StateDictOptions, get_model_state_dict, get_state_dict, init_optimizer_state, load,
    load_in_place, optimizer_template, save, set_state_dict,
};
use fsdp_comm::run_local;
use fsdp_dcp::reader::CheckpointReader;
use fsdp_nn::Optimizer;
use fsdp_nn::algorithm::{AdagradOptions, AdamOptions, Algorithm, SgdOptions};
use fsdp_state::{GatherOptions, StateValue, flatten_containers, gather_state_dict};

use crate::training::{Model, both, new_model, shared, step, views};

fn algorithms() -> [Algorithm; 5] {
    [
        Algorithm::AdamW(AdamOptions { lr: 0.01, amsgrad: true, ..AdamOptions::adamw() }),
        Algorithm::Adam(AdamOptions { lr: 0.01, ..AdamOptions::default() }),
        // With dampening a first step and a later one with a buffer of zeros differ.
        Algorithm::Sgd(SgdOptions { lr: 0.01, momentum: 0.9, dampening: 0.5, ..SgdOptions::default() }),
        Algorithm::Sgd(SgdOptions { lr: 0.01, ..SgdOptions::default() }),
        Algorithm::Adagrad(AdagradOptions { lr: 0.01, initial_accumulator_value: 0.5, ..AdagradOptions::default() }),
    ]
}

fn resume(path: &Path, model: &Model, optimizer: &mut Optimizer, in_place: bool) {
    let checkpoint = CheckpointReader::open(path).unwrap();
    if in_place {
        init_optimizer_state(&checkpoint, &["optim"], &mut [optimizer]).unwrap();
    }
    let template = optimizer_template(&checkpoint, &["optim"], &[optimizer]).unwrap();
    let mut loaded = both(get_model_state_dict(model.parameters(), &shared()).unwrap(), template);
    let load = if in_place { load_in_place } else { load };
    load(path, &mut loaded, model.group(), &LoadOptions::default()).unwrap();
    let part = |key: &str| loaded.dict(key).cloned().unwrap_or_default();
    set_state_dict(model.parameters(), &mut [optimizer], &part("model"), &part("optim"), &StateDictOptions::default())
        .unwrap();
}

fn bits(model: &Model, optimizer: &Optimizer) -> Vec<String> {
    let (m, o) = get_state_dict(model.parameters(), &[optimizer], &StateDictOptions::default()).unwrap();
    let whole = gather_state_dict(model.group(), &both(m, o), &GatherOptions::default()).unwrap();
    let leaves = flatten_containers(&whole).unwrap().values.into_iter();
    leaves
        .map(|(key, value)| match value {
            StateValue::Tensor(tensor) => {
                let bytes = fsdp_flat::storage::with_bytes(&tensor.contiguous().unwrap(), <[u8]>::to_vec).unwrap();
                format!("{key} {:?} {bytes:?}", tensor.dims())
            }
            other => format!("{key} {other:?}"),
        })
        .collect()
}

#[test]
fn it_goes_on_as_after_a_load_into_fresh_tensors() {
    let dir = tempfile::tempdir().unwrap();
    for (index, algorithm) in algorithms().iter().enumerate() {
        for saved_flat in [false, true] {
            let path = dir.path().join(format!("{index}-{saved_flat}"));
            let saved = run_local(2, |group| {
                let (model, mut optimizer) = new_model(&group, !saved_flat, algorithm, 1);
                (0..2).for_each(|seed| _ = step(&model, &mut optimizer, seed));
                save(path.as_path(), &views(&model, &optimizer), &group, &SaveOptions::default()).unwrap();
                bits(&model, &optimizer)
            })
            .unwrap();
            for (world, flat) in [(1, false), (2, true), (3, false), (5, false)] {
                run_local(world, |group| {
                    let outcome = |in_place: bool| {
                        let (model, mut optimizer) = new_model(&group, !flat, algorithm, 2);
                        resume(&path, &model, &mut optimizer, in_place);
                        let resumed = bits(&model, &optimizer);
                        (2..4).for_each(|seed| _ = step(&model, &mut optimizer, seed));
                        (resumed, bits(&model, &optimizer))
                    };
                    let (in_place, fresh) = (outcome(true), outcome(false));
                    assert_eq!(in_place, fresh, "{algorithm:?} {saved_flat} {world} {flat}");
                    assert_eq!(in_place.0, saved[0], "{algorithm:?} {saved_flat} {world} {flat}");
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn room_is_made_for_what_was_saved_and_a_state_that_is_there_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (fresh, stepped) = (dir.path().join("fresh"), dir.path().join("stepped"));
    let algorithm = &Algorithm::Sgd(SgdOptions { lr: 0.1, momentum: 0.9, ..SgdOptions::default() });
    run_local(2, |group| {
        let (model, mut optimizer) = new_model(&group, true, algorithm, 1);
        for path in [&fresh, &stepped] {
            save(path.as_path(), &views(&model, &optimizer), &group, &SaveOptions::default()).unwrap();
            step(&model, &mut optimizer, 0);
        }
        let init = |path: &Path, optimizer: &mut Optimizer| {
            init_optimizer_state(&CheckpointReader::open(path).unwrap(), &["optim"], &mut [optimizer]).unwrap();
        };
        // SGD has no state before its first step, so nothing was saved.
        let (model, mut optimizer) = new_model(&group, true, algorithm, 1);
        init(&fresh, &mut optimizer);
        assert!(optimizer.is_fresh());
        // The second checkpoint was saved after one step.
        init(&stepped, &mut optimizer);
        let buffer = |optimizer: &Optimizer| {
            let state = optimizer.state_of("a.weight").unwrap().unwrap();
            assert_eq!(state.keys().collect::<Vec<_>>(), ["momentum_buffer"]);
            state["momentum_buffer"].as_sharded().unwrap().clone()
        };
        let zeros = buffer(&optimizer);
        let sum = |tensor: &fsdp_flat::ShardedTensor| {
            let shards = tensor.shards().iter();
            shards.map(|shard| shard.tensor.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()).sum::<f32>()
        };
        assert_eq!(sum(&zeros), 0.0);
        step(&model, &mut optimizer, 0);
        let stepped_sum = sum(&zeros);
        assert!(stepped_sum > 0.0);
        init(&stepped, &mut optimizer);
        assert!(buffer(&optimizer).is_same_view(&zeros));
        assert_eq!(sum(&zeros), stepped_sum);
    })
    .unwrap();
}
