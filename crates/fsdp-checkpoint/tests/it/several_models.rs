//! Several runs in one checkpoint, each below a key of its own: weights, moments, steps and
//! learning rates of each come back, on any number of ranks.

use candle_core::Tensor;
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, LoadReport, SaveOptions,
    Stateful, StatefulDict, load_whole, save,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::HostBytes;
use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::reader::OpenOptions;
use fsdp_nn::algorithm::{Algorithm, SgdOptions};
use fsdp_state::{GatherOptions, StateDict, StateError, flatten_state_dict, gather_state_dict};

use crate::in_place::resume::bits;
use crate::in_place::training::{Run, adamw, new_run, step};

fn momentum() -> Algorithm {
    Algorithm::Sgd(SgdOptions {
        lr: 0.1,
        momentum: 0.9,
        ..SgdOptions::default()
    })
}

/// A generator and a discriminator: other algorithms, and other seeds for each caller.
fn two_runs(group: &ProcessGroup, seed: u64) -> [Run; 2] {
    let mut generator = new_run(group, true, &adamw(), seed);
    generator.values.insert("epoch", 0i64);
    [generator, new_run(group, false, &momentum(), seed + 1)]
}

/// Trains both, one for longer and at another rate.
fn train(runs: &mut [Run; 2]) {
    (0..3).for_each(|seed| _ = step(&mut runs[0], seed));
    (0..2).for_each(|seed| _ = step(&mut runs[1], seed));
    for group in runs[1].optimizers[0].groups_mut() {
        group.algorithm.set_lr(0.025).unwrap();
    }
    runs[0].values.insert("epoch", 7i64);
}

fn both(runs: &mut [Run; 2]) -> StatefulDict<'_> {
    let [generator, discriminator] = runs;
    StatefulDict::new()
        .with("generator", generator)
        .with("discriminator", discriminator)
}

fn all_bits(runs: &[Run; 2]) -> [Vec<String>; 2] {
    [bits(&runs[0]), bits(&runs[1])]
}

#[test]
fn two_runs_in_one_checkpoint_come_back_with_moments_steps_and_rates() {
    for is_async in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let saved = run_local(2, |group| {
            let mut checkpointer =
                Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
            let mut runs = two_runs(&group, 1);
            train(&mut runs);
            if is_async {
                checkpointer.save_async(1, &both(&mut runs)).unwrap();
                let saved = all_bits(&runs);
                train(&mut runs);
                checkpointer.wait().unwrap();
                saved
            } else {
                checkpointer.save(1, &both(&mut runs)).unwrap();
                all_bits(&runs)
            }
        })
        .unwrap();
        for ranks in [1, 2, 3] {
            run_local(ranks, |group| {
                let mut checkpointer =
                    Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
                let mut runs = two_runs(&group, 9);
                let (_, report) = checkpointer
                    .load_latest(&mut both(&mut runs))
                    .unwrap()
                    .unwrap();
                assert!(report.is_clean(), "{report:?}");
                assert_eq!(all_bits(&runs), saved[0], "async {is_async}, {ranks} ranks");
            })
            .unwrap();
        }
    }
}

#[test]
fn names_in_errors_and_options_are_those_of_the_whole_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("saved");
    run_local(2, |group| {
        let mut runs = two_runs(&group, 1);
        train(&mut runs);
        let state = both(&mut runs).state_dict().unwrap();
        save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
        let load = |states: &mut StatefulDict<'_>, only: Option<&str>, strict: bool| {
            let load = LoadOptions {
                only: only.map(|key| vec![key.to_owned()]),
                strict,
                ..LoadOptions::default()
            };
            let options = CheckpointerOptions {
                load,
                ..CheckpointerOptions::default()
            };
            let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
            checkpointer.load(path.as_path(), states)
        };
        // The other one stays as it is, and so does the optimizer.
        let mut others = two_runs(&group, 9);
        let before = all_bits(&others);
        load(&mut both(&mut others), Some("generator.model"), true).unwrap();
        let after = all_bits(&others);
        assert_ne!(after[0], before[0]);
        assert_eq!(after[1], before[1]);
        assert_eq!(
            others[0].values.plain_at(&["epoch"]).unwrap().as_int(),
            Some(0)
        );
        // A key of the checkpoint that no state takes, and a key that is nowhere.
        let [generator, _] = &mut others;
        let mut one = StatefulDict::new().with("generator", generator);
        let error = load(&mut one, None, true).unwrap_err().to_string();
        assert!(
            error.contains("unexpected") && error.contains("`discriminator."),
            "{error}"
        );
        let report = load(&mut one, None, false).unwrap();
        assert!(
            report.missing.is_empty() && !report.unexpected.is_empty(),
            "{report:?}"
        );
        let error = load(&mut one, Some("teacher"), true)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("missing") && error.contains("`teacher`"),
            "{error}"
        );
        // The error names a value of one state by the key of the state and its own name.
        others[1].values.insert("epoch", 0i64);
        let error = load(&mut both(&mut others), None, true)
            .unwrap_err()
            .to_string();
        assert!(error.contains("`discriminator.epoch`"), "{error}");
        // A second part that does not fit is found before the first one is loaded.
        let [generator, discriminator] = &mut others;
        let mut swapped = StatefulDict::new()
            .with("discriminator", generator)
            .with("generator", discriminator);
        assert!(load(&mut swapped, None, true).is_err());
        let [_, discriminator] = &mut others;
        discriminator.values.remove("epoch");
        step(discriminator, 7);
        let mut lacking = StateDict::new();
        lacking.insert("absent", 1i64);
        let before = bits(discriminator);
        let mut parts = StatefulDict::new()
            .with("discriminator", discriminator)
            .with("generator", &mut lacking);
        let error = load(&mut parts, None, true).unwrap_err();
        assert!(
            matches!(
                error,
                CheckpointError::State(StateError::Incompatible { .. })
            ),
            "{error}"
        );
        assert!(error.to_string().contains("`generator.absent`"), "{error}");
        assert_eq!(bits(&others[1]), before);
    })
    .unwrap();
    let keys = load_whole(
        path.as_path(),
        &["generator", "model"],
        &LoadOptions::default(),
    );
    assert!(keys.unwrap().dict("generator").is_some());
}

#[test]
fn ranks_that_load_other_states_all_get_an_error_that_names_them() {
    let dir = tempfile::tempdir().unwrap();
    let messages = run_local(3, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut runs = two_runs(&group, 1);
        train(&mut runs);
        checkpointer.save(1, &both(&mut runs)).unwrap();
        let mut others = two_runs(&group, 9);
        let before = all_bits(&others);
        let [generator, discriminator] = &mut others;
        let mut states = StatefulDict::new().with("discriminator", discriminator);
        if group.rank() != 1 {
            states = states.with("generator", generator);
        }
        let error = checkpointer.load(1, &mut states).unwrap_err().to_string();
        assert_eq!(all_bits(&others), before);
        // The group goes on.
        checkpointer.load(1, &mut both(&mut others)).unwrap();
        assert_eq!(all_bits(&others), all_bits(&runs));
        error
    })
    .unwrap();
    for message in &messages {
        assert!(
            message.contains("rank 1") && message.contains("discriminator, generator"),
            "{message}"
        );
        assert_eq!(message, &messages[0]);
    }
}

#[test]
fn damage_in_a_later_state_is_told_with_the_states_that_are_new_then() {
    for staged in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        run_local(1, |group| {
            let load = LoadOptions {
                staged,
                ..LoadOptions::default()
            };
            let options = CheckpointerOptions {
                load,
                ..CheckpointerOptions::default()
            };
            let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
            let mut runs = two_runs(&group, 1);
            train(&mut runs);
            checkpointer.save(1, &both(&mut runs)).unwrap();
            let path = dir.path().join("step-00000001");
            let checkpoint = open(path.as_path(), OpenOptions::default()).unwrap();
            let tensor = checkpoint.metadata().tensor("generator.model.a.weight");
            let stored = tensor.unwrap().chunks[0].stored.clone().unwrap();
            let file = path.join(stored.relative_path.as_str());
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[(stored.offset + stored.length) as usize - 1] ^= 1;
            #[expect(clippy::disallowed_methods, reason = "the test damages a file")]
            std::fs::write(&file, bytes).unwrap();
            let mut others = two_runs(&group, 9);
            let error = checkpointer.load(1, &mut both(&mut others)).unwrap_err();
            assert!(
                matches!(
                    error,
                    CheckpointError::State(StateError::PartlyLoaded { .. })
                ),
                "{error}"
            );
            let message = error.to_string();
            assert!(message.contains("`generator`: "), "{message}");
            assert!(
                message.ends_with("loaded before: discriminator"),
                "{message}"
            );
            assert!(
                !message.contains("`staged`"),
                "it would not help: {message}"
            );
        })
        .unwrap();
    }
}

/// A type of one's own that puts the state dicts of two runs together, as torch programs do, and
/// loads into them.
struct Own([Run; 2]);

impl Stateful for Own {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        let mut state = StateDict::new();
        state.insert("g", self.0[0].state_dict()?);
        state.insert("d", self.0[1].state_dict()?);
        Ok(state)
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        let mut state = self.state_dict()?;
        state.load_state_dict(checkpoint, group, options)
    }
}

#[test]
fn a_load_into_the_state_dicts_of_runs_is_an_error_that_tells_what_to_call() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut own = Own(two_runs(&group, 1));
        train(&mut own.0);
        checkpointer.save(1, &own).unwrap();
        let saved = all_bits(&own.0);
        let mut fresh = Own(two_runs(&group, 9));
        let before = all_bits(&fresh.0);
        let error = checkpointer.load(1, &mut fresh).unwrap_err().to_string();
        assert!(error.contains("StatefulDict"), "{error}");
        assert_eq!(all_bits(&fresh.0), before, "nothing has changed");
        // The same checkpoint loads into the runs themselves.
        let [g, d] = &mut fresh.0;
        let mut states = StatefulDict::new().with("g", g).with("d", d);
        assert!(checkpointer.load(1, &mut states).unwrap().is_clean());
        assert_eq!(all_bits(&fresh.0), saved);
    })
    .unwrap();
}

#[test]
fn keys_that_would_not_be_one_key_in_the_checkpoint_are_refused() {
    run_local(1, |_| {
        for key in ["", "a.b"] {
            let mut state = StateDict::new();
            let states = StatefulDict::new().with(key, &mut state);
            let error = states.state_dict().unwrap_err().to_string();
            assert!(error.contains("the key of a state"), "{error}");
        }
    })
    .unwrap();
}

/// `two_models/two_models.py` saved it: `dcp.save({"generator": AppState(…), "discriminator":
/// AppState(…)})`.
#[test]
fn two_models_that_torch_saved_come_back_with_moments_steps_and_rates() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/it/two_models/checkpoint"
    );
    let saved = load_whole(path, &[], &LoadOptions::default()).unwrap();
    let saved = flatten_state_dict(&saved).unwrap().values;
    for ranks in [1, 3] {
        run_local(ranks, |group| {
            let mut generator = new_run(&group, true, &adamw(), 8);
            let mut discriminator = new_run(&group, false, &momentum(), 9);
            let mut both = StatefulDict::new()
                .with("generator", &mut generator)
                .with("discriminator", &mut discriminator);
            let checkpoint = open(path, OpenOptions::default()).unwrap();
            let options = LoadOptions::default();
            both.load_state_dict(&*checkpoint, &group, &options)
                .unwrap();
            let loaded = both.state_dict().unwrap();
            let loaded = gather_state_dict(&loaded, &group, &GatherOptions::default()).unwrap();
            let loaded = flatten_state_dict(&loaded).unwrap().values;
            let mut compared = 0;
            for (key, value) in &saved {
                if let Some(tensor) = value.as_tensor() {
                    let loaded = loaded[key].as_tensor().unwrap();
                    assert_eq!(bytes(loaded), bytes(tensor), "{key}");
                    compared += 1;
                }
            }
            assert_eq!(compared, 5 * (1 + 3) + 5 * (1 + 1));
            for (key, rate) in [("generator", 0.003), ("discriminator", 0.1)] {
                let rates = &loaded[&format!("{key}.optim.param_groups.0.lr")];
                assert_eq!(rates.as_plain().unwrap().as_float(), Some(rate));
            }
        })
        .unwrap();
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    HostBytes::read(&tensor.contiguous().unwrap())
        .unwrap()
        .to_vec()
}
