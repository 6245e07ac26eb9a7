//! torch's flow of a resume: the state dicts of a fresh model and a fresh optimizer are loaded
//! into, then set. Training goes on as if it had never stopped, for every algorithm and every way
//! to load into a dict.

use std::path::Path;

use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, LoadReport, SaveOptions,
    StateDictOptions, Stateful, get_state_dict, load, load_in_place, save, set_state_dict,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_nn::Optimizer;
use fsdp_nn::algorithm::{AdafactorOptions, Algorithm, SgdOptions};
use fsdp_state::{StateDict, StateValue};

use crate::in_place::resume::algorithms;
use crate::in_place::training::{Run, new_run, step};

/// The algorithms whose state exists from the start, and those whose state comes with the first
/// step.
fn all_algorithms() -> Vec<Algorithm> {
    let mut all = algorithms().to_vec();
    all.push(Algorithm::Sgd(SgdOptions {
        lr: 0.05,
        momentum: 0.9,
        nesterov: true,
        ..SgdOptions::default()
    }));
    all.push(Algorithm::Adafactor(AdafactorOptions {
        lr: 0.05,
        ..AdafactorOptions::default()
    }));
    all
}

fn dicts(run: &Run, share_storage: bool) -> StateDict {
    let options = StateDictOptions {
        share_storage,
        ..StateDictOptions::default()
    };
    let optimizers: Vec<&Optimizer> = run.optimizers.iter().collect();
    let (model, optim) = get_state_dict(run.model.parameters(), &optimizers, &options).unwrap();
    [("model", model), ("optim", optim)]
        .into_iter()
        .map(|(key, dict)| (key, StateValue::from(dict)))
        .collect()
}

fn set(run: &mut Run, state: &StateDict) {
    let part = |key: &str| state.dict(key).cloned().unwrap_or_default();
    let mut optimizers: Vec<&mut Optimizer> = run.optimizers.iter_mut().collect();
    let report = set_state_dict(
        &part("model"),
        &part("optim"),
        run.model.parameters(),
        &mut optimizers,
        &StateDictOptions::default(),
    )
    .unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// A run as a user of torch writes one: the state by views, and a load into them.
struct OwnState<'a>(&'a mut Run);

impl Stateful for OwnState<'_> {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        Ok(dicts(self.0, true))
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        let mut state = dicts(self.0, true);
        let report = state.load_state_dict(checkpoint, group, options)?;
        set(self.0, &state);
        Ok(report)
    }
}

#[derive(Debug, Clone, Copy)]
enum Way {
    Load,
    LoadInPlace,
    OfStateDict,
    OfOwnState,
}

fn resume(way: Way, path: &Path, run: &mut Run) {
    let group = run.model.group().clone();
    let options = LoadOptions::default();
    let checkpointer = || Checkpointer::new(path, &group, CheckpointerOptions::default()).unwrap();
    let mut state = dicts(run, false);
    let report = match way {
        Way::Load => load(path, &mut state, &group, &options).unwrap(),
        Way::LoadInPlace => load_in_place(path, &mut state, &group, &options).unwrap(),
        Way::OfStateDict => checkpointer().load(path, &mut state).unwrap(),
        Way::OfOwnState => checkpointer().load(path, &mut OwnState(run)).unwrap(),
    };
    assert!(report.is_clean(), "{way:?}: {report:?}");
    if !matches!(way, Way::OfOwnState) {
        set(run, &state);
    }
}

/// Saves what `state` returns of a run of two ranks after two steps, and returns the losses of its
/// next four steps.
fn save_and_go_on(
    path: &Path,
    algorithm: &Algorithm,
    state: impl Fn(&Run) -> StateDict + Sync,
) -> Vec<f32> {
    let mut losses = run_local(2, |group| {
        let mut run = new_run(&group, true, algorithm, 1);
        (0..2).for_each(|seed| _ = step(&mut run, seed));
        save(path, &state(&run), &group, &SaveOptions::default()).unwrap();
        (2..6)
            .map(|seed| step(&mut run, seed))
            .collect::<Vec<f32>>()
    })
    .unwrap();
    losses.remove(0)
}

#[test]
fn training_goes_on_from_a_load_into_the_dicts_of_a_fresh_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    for (index, algorithm) in all_algorithms().iter().enumerate() {
        let path = dir.path().join(index.to_string());
        let went_on = save_and_go_on(&path, algorithm, |run| dicts(run, false));
        for way in [
            Way::Load,
            Way::LoadInPlace,
            Way::OfStateDict,
            Way::OfOwnState,
        ] {
            for world in [1, 2, 3] {
                let resumed = run_local(world, |group| {
                    let mut run = new_run(&group, true, algorithm, 2);
                    resume(way, &path, &mut run);
                    (2..6)
                        .map(|seed| step(&mut run, seed))
                        .collect::<Vec<f32>>()
                })
                .unwrap();
                for (resumed, expected) in resumed[0].iter().zip(&went_on) {
                    assert!(
                        (resumed - expected).abs() <= 1e-5 * expected.abs(),
                        "{algorithm:?}, {way:?}, {world} ranks: {resumed}, {expected}"
                    );
                }
            }
        }
    }
}

/// A checkpoint that a run saves of itself fits the dicts of a fresh optimizer too.
#[test]
fn a_checkpoint_of_a_run_fits_the_dicts_of_a_fresh_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    for (index, algorithm) in all_algorithms().iter().enumerate() {
        let path = dir.path().join(index.to_string());
        let went_on = save_and_go_on(&path, algorithm, |run| run.state_dict().unwrap());
        let resumed = run_local(3, |group| {
            let mut run = new_run(&group, true, algorithm, 2);
            resume(Way::Load, &path, &mut run);
            step(&mut run, 2)
        })
        .unwrap();
        let difference = (resumed[0] - went_on[0]).abs();
        assert!(
            difference <= 1e-5 * went_on[0].abs(),
            "{algorithm:?}: {difference}"
        );
    }
}

/// Setting what was got from a fresh optimizer changes nothing of its training, as far as torch
/// promises it too: without dampening.
#[test]
fn a_fresh_optimizer_that_gets_its_own_dict_trains_as_before() {
    for algorithm in all_algorithms() {
        if matches!(&algorithm, Algorithm::Sgd(options) if options.dampening != 0.0) {
            continue;
        }
        let losses = |sets: bool| {
            run_local(2, |group| {
                let mut run = new_run(&group, true, &algorithm, 1);
                if sets {
                    let state = dicts(&run, false);
                    set(&mut run, &state);
                }
                (0..3)
                    .map(|seed| step(&mut run, seed))
                    .collect::<Vec<f32>>()
            })
            .unwrap()
        };
        assert_eq!(losses(true), losses(false), "{algorithm:?}");
    }
}
