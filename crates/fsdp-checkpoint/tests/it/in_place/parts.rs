//! A load may be limited to some parts of a checkpoint: what is not asked for stays as it is, and
//! a part that the checkpoint lacks is an error.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions, load, load_in_place, save,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::AveragedModel;
use fsdp_state::{StateDict, StateValue, is_part_of};

use crate::in_place::resume::{bits, train_on, with_parts};
use crate::in_place::training::{Run, adamw, new_run};

const PARTS: [&str; 7] = [
    "model", "optim", "sampler", "scaler", "average", "step", "data",
];

/// Makes a run that has every part, and has done some steps.
fn whole_run(group: &ProcessGroup, steps: u64) -> Run {
    let mut run = with_parts(new_run(group, true, &adamw(), steps), 100);
    let mut average = AveragedModel::new(run.model.parameters(), 0.5).unwrap();
    train_on(&mut run, 0..steps);
    average.update().unwrap();
    run.average = Some(average);
    run.values.insert("step", steps as i64);
    let data: StateDict = [("position", (steps as i64 * 100).into())]
        .into_iter()
        .collect();
    run.values.insert("data", data);
    run
}

/// Saves a whole run as step 1.
fn saved(directory: &Path) -> Vec<String> {
    let bits = run_local(2, |group| {
        let run = whole_run(&group, 7);
        checkpointer(directory, &group, None, true)
            .save(1, &run)
            .unwrap();
        bits(&run)
    });
    bits.unwrap().remove(0)
}

fn checkpointer(
    run: &Path,
    group: &ProcessGroup,
    only: Option<&[&str]>,
    strict: bool,
) -> Checkpointer {
    let load = LoadOptions {
        only: only.map(|parts| parts.iter().map(|&part| part.to_owned()).collect()),
        strict,
        ..LoadOptions::default()
    };
    let options = CheckpointerOptions {
        load,
        ..CheckpointerOptions::default()
    };
    Checkpointer::new(run, group, options).unwrap()
}

/// Returns the values below one of these keys.
fn of_parts(bits: &[String], parts: &[&str], is_in: bool) -> Vec<String> {
    let is_wanted = |line: &&String| {
        let key = line.split(' ').next().unwrap();
        parts.iter().any(|part| is_part_of(key, part)) == is_in
    };
    bits.iter().filter(is_wanted).cloned().collect()
}

#[test]
fn each_part_is_loaded_alone_and_all_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    let saved = saved(dir.path());
    let mut selections: Vec<Vec<&str>> = PARTS.iter().map(|&part| vec![part]).collect();
    selections.push(vec!["model", "scaler"]);
    for world in [1, 2, 3] {
        for only in &selections {
            run_local(world, |group| {
                let mut run = whole_run(&group, 2);
                let before = bits(&run);
                let mut checkpointer = checkpointer(dir.path(), &group, Some(only), true);
                let report = checkpointer.load(1, &mut run).unwrap();
                assert!(report.is_clean(), "{report:?}");
                let after = bits(&run);
                let loaded = of_parts(&after, only, true);
                assert_eq!(loaded, of_parts(&saved, only, true), "{only:?}");
                assert!(loaded != of_parts(&before, only, true));
                let others = of_parts(&after, only, false);
                assert_eq!(others, of_parts(&before, only, false), "{only:?}");
            })
            .unwrap();
        }
    }
}

/// Returns what a load of some parts of a checkpoint says is missing, the same on both ranks, and
/// checks that it has changed nothing.
fn missing(run: &Path, only: &[&str], strict: bool) -> String {
    let reports = run_local(2, |group| {
        let mut run_there = whole_run(&group, 2);
        let before = bits(&run_there);
        let mut checkpointer = checkpointer(run, &group, Some(only), strict);
        let missing = match checkpointer.load(1, &mut run_there) {
            Err(error) if strict => error.to_string(),
            Ok(report) if !strict => report.missing.join(", "),
            other => panic!("{other:?}"),
        };
        assert_eq!(bits(&run_there), before);
        missing
    });
    let [first, second] = <[_; 2]>::try_from(reports.unwrap()).unwrap();
    assert_eq!(first, second);
    first
}

#[test]
fn a_part_that_the_checkpoint_lacks_is_an_error_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut run = whole_run(&group, 7);
        run.optimizers.clear();
        run.average = None;
        run.sampler = None;
        run.scaler = None;
        run.values = StateDict::new();
        checkpointer(dir.path(), &group, None, true)
            .save(1, &run)
            .unwrap();
    })
    .unwrap();
    for (part, key) in [
        ("optim", "param_groups"),
        ("sampler", "sampler."),
        ("scaler", "scaler."),
        ("average", "average."),
        ("step", "step"),
        ("data", "data.position"),
    ] {
        let error = missing(dir.path(), &[part], true);
        assert!(error.contains("missing") && error.contains(key), "{error}");
    }
}

#[test]
fn a_part_that_nobody_has_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    for part in ["modle", "model.head", "optim.state", "dat", "data.position"] {
        for strict in [true, false] {
            let found = missing(dir.path(), &[part], strict);
            if strict {
                assert!(
                    found.contains(&format!("missing key(s) `{part}`")),
                    "{found}"
                );
            } else {
                assert_eq!(found, part);
            }
        }
    }
}

#[test]
fn a_checkpoint_of_a_model_alone_is_its_model_part() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("step-00000001");
    run_local(2, |group| {
        let run = whole_run(&group, 7);
        let state = fsdp_checkpoint::Stateful::state_dict(&run).unwrap();
        let model = state.dict("model").unwrap();
        save(path.as_path(), model, &group, &SaveOptions::default()).unwrap();
        let saved = of_parts(&bits(&run), &["model"], true);
        let mut other = whole_run(&group, 2);
        let before = bits(&other);
        let mut checkpointer = checkpointer(dir.path(), &group, Some(&["model"]), true);
        assert!(checkpointer.load(1, &mut other).unwrap().is_clean());
        let after = bits(&other);
        assert_eq!(of_parts(&after, &["model"], true), saved);
        assert_eq!(
            of_parts(&after, &["model"], false),
            of_parts(&before, &["model"], false)
        );
    })
    .unwrap();
}

/// A state of two tensors and a value, one of each below `a`.
fn small_state(value: f32) -> StateDict {
    let tensor = || Tensor::full(value, 3, &Device::Cpu).unwrap();
    let mut state = StateDict::new();
    let inner: StateDict = [
        ("weight", StateValue::from(tensor())),
        ("step", StateValue::from(f64::from(value))),
    ]
    .into_iter()
    .collect();
    state.insert("a", inner);
    state.insert("ab", tensor());
    state
}

fn values(state: &StateDict) -> [f32; 3] {
    let first = |tensor: &StateValue| {
        let tensor = tensor.as_tensor().unwrap().to_dtype(DType::F32).unwrap();
        tensor.to_vec1::<f32>().unwrap()[0]
    };
    let inner = state.dict("a").unwrap();
    [
        first(inner.get("weight").unwrap()),
        inner.plain_at(&["step"]).unwrap().as_float().unwrap() as f32,
        first(state.get("ab").unwrap()),
    ]
}

#[test]
fn a_state_dict_is_loaded_in_part_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    run_local(2, |group| {
        save(
            path.as_path(),
            &small_state(7.0),
            &group,
            &SaveOptions::default(),
        )
        .unwrap();
        let only = |part: &str| LoadOptions {
            only: Some(vec![part.to_owned()]),
            ..LoadOptions::default()
        };
        for in_place in [false, true] {
            let load = if in_place { load_in_place } else { load };
            let mut state = small_state(2.0);
            load(path.as_path(), &mut state, &group, &only("a")).unwrap();
            assert_eq!(values(&state), [7.0, 7.0, 2.0]);
            let mut state = small_state(2.0);
            load(path.as_path(), &mut state, &group, &only("ab")).unwrap();
            assert_eq!(values(&state), [2.0, 2.0, 7.0]);
            let error = load(path.as_path(), &mut state, &group, &only("b")).unwrap_err();
            assert!(error.to_string().contains('b'), "{error}");
            // A list that was filtered to nothing.
            let nothing = LoadOptions {
                only: Some(Vec::new()),
                ..LoadOptions::default()
            };
            let error = load(path.as_path(), &mut state, &group, &nothing).unwrap_err();
            assert!(error.to_string().contains("selects nothing"), "{error}");
            assert_eq!(values(&state), [2.0, 2.0, 7.0]);
        }
    })
    .unwrap();
}

/// A part that is set after the load would begin anew without a word, so the load says that the run
/// has no place for what was saved of it.
#[test]
fn the_state_of_a_part_that_the_run_does_not_have_yet_is_not_taken_for_values() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    run_local(2, |group| {
        let without = |part: &str| {
            let mut run = whole_run(&group, 0);
            match part {
                "sampler" => run.sampler = None,
                _ => run.scaler = None,
            }
            run
        };
        for part in ["sampler", "scaler"] {
            let mut run = without(part);
            let before = bits(&run);
            let error = checkpointer(dir.path(), &group, None, true)
                .load(1, &mut run)
                .unwrap_err()
                .to_string();
            assert!(error.contains(&format!("`{part}.")), "{error}");
            assert_eq!(bits(&run), before);

            let report = checkpointer(dir.path(), &group, None, false)
                .load(1, &mut run)
                .unwrap();
            assert!(!report.unexpected.is_empty());
            assert!(report.unexpected.iter().all(|key| is_part_of(key, part)));
            assert!(run.values.get(part).is_none());

            // Set before the load, it goes on; and what was loaded can be saved again.
            let mut run = whole_run(&group, 0);
            let mut checkpointer = checkpointer(dir.path(), &group, None, true);
            assert!(checkpointer.load(1, &mut run).unwrap().is_clean());
            assert_eq!(bits(&run), bits(&whole_run(&group, 7)));
            checkpointer
                .save(2 + u64::from(part == "scaler"), &run)
                .unwrap();
        }
    })
    .unwrap();
}
