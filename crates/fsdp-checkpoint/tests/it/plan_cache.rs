//! A checkpointer plans once; it plans again when what any rank holds has changed, and never writes
//! by a plan that is wrong.

use std::path::Path;

use candle_core::{Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, SaveReport, load_whole,
};
use fsdp_comm::{CommError, Operation, ProcessGroup, run_local};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::TensorBox;
use fsdp_layout::shard::chunk_range;
use fsdp_state::{StateDict, StateValue};

const COLUMNS: usize = 50;

/// Rows of a matrix, cut over the ranks, and values that every rank holds.
fn state(group: &ProcessGroup, rows: usize, value: f32) -> StateDict {
    let own = chunk_range(rows, group.world_size(), group.rank());
    let shards = (!own.is_empty()).then(|| LocalShard {
        bounds: TensorBox::new(vec![own.start, 0], vec![own.len(), COLUMNS]),
        tensor: Tensor::full(value, (own.len(), COLUMNS), &Device::Cpu).unwrap(),
    });
    let dtype = candle_core::DType::F32;
    let mut state = StateDict::new();
    state.insert(
        "matrix",
        ShardedTensor::new(dtype, vec![rows, COLUMNS], shards.into_iter().collect()).unwrap(),
    );
    state.insert("vector", Tensor::full(value, 300, &Device::Cpu).unwrap());
    // Of another length each time: values are no part of the layout.
    state.insert("name", "x".repeat(value as usize));
    state
}

fn checkpointer(run: &Path, group: &ProcessGroup) -> Checkpointer {
    Checkpointer::new(run, group, CheckpointerOptions::default()).unwrap()
}

fn check(path: &Path, rows: usize, value: f32) {
    let saved = load_whole(path, &[], &LoadOptions::default()).unwrap();
    let tensor = |key| {
        saved
            .get(key)
            .and_then(StateValue::as_tensor)
            .unwrap()
            .flatten_all()
            .unwrap()
    };
    let tensor = |key| tensor(key).to_vec1::<f32>().unwrap();
    assert_eq!(tensor("matrix"), vec![value; rows * COLUMNS]);
    assert_eq!(tensor("vector"), vec![value; 300]);
    assert_eq!(
        saved.plain_at(&["name"]).unwrap().as_str().unwrap().len(),
        value as usize
    );
}

#[test]
fn an_unchanged_layout_exchanges_no_plans() {
    for world in [1, 2, 5] {
        let dir = tempfile::tempdir().unwrap();
        run_local(world, |group| {
            let mut saver = checkpointer(dir.path(), &group);
            let mut counts = Vec::new();
            for round in 1..=3u8 {
                let path = dir.path().join(round.to_string());
                let before = group.traffic();
                saver
                    .save(&path, &state(&group, 7, f32::from(round)))
                    .unwrap();
                let traffic = group.traffic().since(&before);
                assert_eq!(traffic.tensor_bytes(), 0);
                counts.push(
                    traffic.count(Operation::GatherObject)
                        + traffic.count(Operation::ScatterObject),
                );
                check(&path, 7, f32::from(round));
            }
            // Plans and selections once; what was written, each time.
            assert_eq!(counts, [3, 1, 1]);
        })
        .unwrap();
    }
}

/// Returns the number of operations that this rank has taken part in.
fn operations(group: &ProcessGroup) -> u64 {
    group.traffic().collectives.values().sum()
}

#[test]
fn a_save_takes_few_rounds_of_communication() {
    for world in [1, 2, 3, 4] {
        let dir = tempfile::tempdir().unwrap();
        run_local(world, |group| {
            let mut checkpointer = checkpointer(dir.path(), &group);
            let mut rounds = Vec::new();
            for step in 1..=3u8 {
                let before = operations(&group);
                let state = state(&group, 7, f32::from(step));
                checkpointer.save(u64::from(step), &state).unwrap();
                rounds.push(operations(&group) - before);
            }
            for step in 4..=5u8 {
                let before = operations(&group);
                let state = state(&group, 7, f32::from(step));
                checkpointer.save_async(u64::from(step), &state).unwrap();
                checkpointer.wait().unwrap();
                rounds.push(operations(&group) - before);
            }
            let first = rounds.remove(0);
            assert!(first <= 11, "the first save of {world} ranks: {first}");
            // A save in the background agrees on the copy too.
            assert!(
                rounds[..2].iter().all(|&rounds| rounds <= 6)
                    && rounds[2..].iter().all(|&rounds| rounds <= 7),
                "{world} ranks: {rounds:?}"
            );
        })
        .unwrap();
    }
}

#[test]
fn a_layout_that_changed_is_planned_anew_even_if_it_did_on_one_rank_only() {
    let dir = tempfile::tempdir().unwrap();
    run_local(3, |group| {
        let mut saver = checkpointer(dir.path(), &group);
        let mut save = |name: &str, state: &StateDict| saver.save(dir.path().join(name), state);
        save("small", &state(&group, 7, 1.0)).unwrap();
        save("large", &state(&group, 11, 2.0)).unwrap();
        // Rank 2 alone holds one tensor more.
        let mut more = state(&group, 11, 3.0);
        if group.rank() == 2 {
            more.insert("more", Tensor::full(3f32, 4, &Device::Cpu).unwrap());
        }
        save("more", &more).unwrap();
        // And then no more: by the old plan it would have to be written.
        save("less", &state(&group, 11, 4.0)).unwrap();
    })
    .unwrap();
    check(&dir.path().join("small"), 7, 1.0);
    check(&dir.path().join("large"), 11, 2.0);
    check(&dir.path().join("more"), 11, 3.0);
    check(&dir.path().join("less"), 11, 4.0);
    let key = |name: &str| {
        load_whole(dir.path().join(name), &["more"], &LoadOptions::default())
            .unwrap()
            .len()
    };
    assert_eq!((key("more"), key("less")), (1, 0));
}

#[test]
fn a_failed_save_and_a_failed_plan_leave_a_saver_that_works() {
    let dir = tempfile::tempdir().unwrap();
    let results: Vec<SaveReport> = run_local(2, |group| {
        let mut saver = checkpointer(dir.path(), &group);
        let mut save = |name: &str, state: &StateDict| saver.save(dir.path().join(name), state);
        save("first", &state(&group, 4, 1.0)).unwrap();
        // There already.
        assert!(matches!(
            save("first", &state(&group, 4, 2.0)),
            Err(CheckpointError::Comm(CommError::RankFailed { .. }))
        ));
        // Rank 1 would have to save a matrix of another shape than rank 0.
        let rows = 4 + group.rank();
        assert!(matches!(
            save("torn", &state(&group, rows, 2.0)),
            Err(CheckpointError::Comm(CommError::RankFailed { .. }))
        ));
        save("second", &state(&group, 4, 2.0)).unwrap()
    })
    .unwrap();
    check(&dir.path().join("first"), 4, 1.0);
    check(&dir.path().join("second"), 4, 2.0);
    assert!(!dir.path().join("torn").exists());
    assert_eq!(
        results[0].total_bytes,
        results[0].rank_bytes + results[1].rank_bytes
    );
}

#[test]
fn checkpointers_of_different_groups_have_different_plans() {
    let dir = tempfile::tempdir().unwrap();
    run_local(4, |group| {
        let mut all = checkpointer(dir.path(), &group);
        let (first, second) = (
            group.subgroup(&[0, 1]).unwrap(),
            group.subgroup(&[2, 3]).unwrap(),
        );
        let own = first.or(second).unwrap();
        let mut half = checkpointer(dir.path(), &own);
        for round in 1..=2 {
            let path = dir.path().join(format!("all-{round}"));
            all.save(path, &state(&group, 9, 1.0)).unwrap();
            let path = dir
                .path()
                .join(format!("half-{}-{round}", own.global_ranks()[0]));
            half.save(path, &state(&own, 9, 2.0)).unwrap();
        }
    })
    .unwrap();
    for round in 1..=2 {
        check(&dir.path().join(format!("all-{round}")), 9, 1.0);
        check(&dir.path().join(format!("half-0-{round}")), 9, 2.0);
        check(&dir.path().join(format!("half-2-{round}")), 9, 2.0);
    }
}

#[test]
fn a_plain_value_that_differs_between_ranks_is_an_error_that_names_its_key() {
    let dir = tempfile::tempdir().unwrap();
    run_local(3, |group| {
        let mut saver = checkpointer(dir.path(), &group);
        let mut save = |name: &str, state: &StateDict| saver.save(dir.path().join(name), state);
        let mut differing = state(&group, 4, 1.0);
        let inner: StateDict = [("seed", i64::from(group.rank() == 2).into())].into_iter().collect();
        differing.insert("generator", inner);
        // Before a plan is made, and by one that is cached.
        for (round, name) in ["first", "third"].into_iter().enumerate() {
            let error = save(name, &differing).unwrap_err();
            assert!(
                matches!(&error, CheckpointError::DifferingValues { key, rank: 2, reference: 0 } if key == "generator.seed"),
                "{error:?}"
            );
            assert!(!dir.path().join(name).exists());
            // A key for each rank is no difference.
            let mut own = state(&group, 4, 1.0);
            own.insert(format!("generator.rank{}", group.rank()), group.rank() as i64);
            save(&format!("own-{round}"), &own).unwrap();
        }
        let saved = load_whole(dir.path().join("own-1"), &[], &LoadOptions::default()).unwrap();
        assert_eq!(saved.plain_at(&["generator.rank2"]).and_then(|rank| rank.as_int()), Some(2));
    })
    .unwrap();
}
