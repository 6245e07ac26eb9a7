//! Saving with N ranks and loading with M: whatever the layout, the bits are the same, and read
//! once.

use fsdp_formats::FileError;
use fsdp_formats::metadata::{encode, encode_in_pieces};
use fsdp_formats::plan::{Deduplicate, plan_save};
use fsdp_formats::storage::Durable;
use fsdp_formats::writer::{
    RankItems, WriteOptions, finish, predict_file_lengths, value_item_length, write_rank,
};

use crate::load::load;
use crate::sample::sample;
use crate::state::save;

/// Cut into several parts, which threads share.
pub(crate) const LARGE: [usize; 2] = [1024, 4099];

#[test]
fn any_number_of_ranks_saves_and_any_number_loads() {
    let state = sample(LARGE);
    let parent = tempfile::tempdir().unwrap();
    for ranks in [1, 2, 3, 5] {
        let target = parent.path().join(format!("ranks-{ranks}"));
        save(&state, ranks, &target, &Durable::new()).unwrap();
        for loading in [1, 2, 3, 4] {
            let (read, needed) = load(&state, loading, &target);
            assert!(
                read as f64 <= needed as f64 * 1.05 + 65536.0,
                "{ranks} to {loading}: {read} of {needed} bytes"
            );
        }
    }
}

#[test]
fn equal_states_give_equal_files() {
    let state = sample(LARGE);
    let parent = tempfile::tempdir().unwrap();
    let (a, b) = (parent.path().join("a"), parent.path().join("b"));
    save(&state, 2, &a, &Durable::new()).unwrap();
    save(&state, 2, &b, &Durable::new()).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(&a)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [".integrity", ".metadata", "__0_0.distcp", "__1_0.distcp"]
    );
    for name in names {
        assert!(
            std::fs::read(a.join(&name)).unwrap() == std::fs::read(b.join(&name)).unwrap(),
            "{name:?}"
        );
    }
}

#[test]
fn metadata_is_never_committed_without_its_files() {
    let state = sample([4, 4]);
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("target");
    save(&state, 1, &target, &Durable::new()).unwrap();
    let before = std::fs::read(target.join("__0_0.distcp")).unwrap();
    let plans = state.plans(1);
    let global = plan_save(&plans, Deduplicate::default()).unwrap();
    // Two saves to one place at the same time, and a rank that has joined the other one.
    let [staging, other] = [(); 2].map(|()| Durable::new().prepare(&target, true).unwrap());
    let joined = Durable::new().join(&target, other.name()).unwrap();
    let items = RankItems {
        rank: 0,
        plan: &plans[0],
        selection: &global.selections[0],
        source: &state,
    };
    let written = write_rank(&joined, &items, &WriteOptions::default(), None).unwrap();
    let error = finish(staging, global.metadata, &[written], None).unwrap_err();
    assert!(matches!(error, FileError::TargetMismatch { .. }), "{error}");
    assert!(std::fs::read(target.join("__0_0.distcp")).unwrap() == before);
}

#[test]
fn a_plan_predicts_the_metadata_and_the_files_that_a_save_makes() {
    let state = sample(LARGE);
    let parent = tempfile::tempdir().unwrap();
    for ranks in [1, 3, 5] {
        let target = parent.path().join(format!("ranks-{ranks}"));
        save(&state, ranks, &target, &Durable::new()).unwrap();
        let mut global = plan_save(&state.plans(ranks), Deduplicate::default()).unwrap();
        let lengths = predict_file_lengths(&mut global, |fqn| {
            value_item_length(&state.values[fqn]).unwrap()
        })
        .unwrap();
        let written = std::fs::read(target.join(".metadata")).unwrap();
        assert!(encode(&global.metadata) == written, "{ranks} ranks");
        let mut pieces = Vec::new();
        encode_in_pieces(&global.metadata, &mut |piece| {
            pieces.extend_from_slice(piece)
        });
        assert!(pieces == written);
        for (rank, length) in lengths.into_iter().enumerate() {
            let file = std::fs::metadata(target.join(format!("__{rank}_0.distcp")));
            assert_eq!(
                file.map_or(0, |file| file.len()),
                length,
                "rank {rank} of {ranks}"
            );
        }
    }
}
