//! Loading into the memory of the live tensors: the same values as a load into fresh memory, for every tensor that shares
//! the storage; nothing changes where the checkpoint does not fit, and damage is told apart.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{CheckpointError, LoadOptions, SaveOptions, load, load_in_place, load_whole, save};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_dcp::plan::LoadPlanError;
use fsdp_flat::storage::{PLAIN_DTYPES, with_bytes, with_bytes_mut, zeros};
use fsdp_flat::{LocalShard, RawTensor, ShardedTensor};
use fsdp_layout::shard::chunk_range;
use fsdp_layout::{ErrorKind, Failure, PlainValue, TensorBox};
use fsdp_state::{LoadReport, StateDict, StateValue};

use crate::training::{adamw, new_model, step, views};

const ROWS: usize = 9;

fn arange(start: usize, count: usize) -> Tensor {
    Tensor::arange(start as f32, (start + count) as f32, &Device::Cpu).unwrap()
}

/// What every rank has of a flat storage and beside it: rows of a matrix and a vector in the one, a tensor of its own, one
/// without elements, a value and bytes.
fn state(flat: &Tensor, group: &ProcessGroup, value: i64) -> StateDict {
    let rows = chunk_range(ROWS, group.world_size(), group.rank());
    let shards = (!rows.is_empty()).then(|| LocalShard {
        bounds: TensorBox::new(vec![rows.start, 0], vec![rows.len(), 4]),
        tensor: flat.narrow(0, rows.start * 4, rows.len() * 4).unwrap().reshape((rows.len(), 4)).unwrap(),
    });
    let matrix = ShardedTensor::new(DType::F32, vec![ROWS, 4], shards.into_iter().collect()).unwrap();
    let mut inner = StateDict::new();
    inner.insert("matrix", matrix);
    inner.insert("vector", flat.narrow(0, ROWS * 4 + 1, 5).unwrap());
    let mut state = StateDict::new();
    state.insert("inner", inner);
    state.insert("own", Tensor::full(value as f64, (2, 3), &Device::Cpu).unwrap());
    state.insert("empty", Tensor::zeros((0, 2), DType::F32, &Device::Cpu).unwrap());
    state.insert("raw", RawTensor::new(fsdp_layout::DType::Bool, vec![2], vec![1, value as u8 % 2]).unwrap());
    state.insert("value", value);
    state
}

const FLAT: usize = ROWS * 4 + 1 + 5;

fn save_on(path: &Path, world: usize) {
    run_local(world, |group| {
        save(path, &state(&arange(0, FLAT), &group, 7), &group, &SaveOptions::default()).unwrap();
    })
    .unwrap();
}

fn options() -> LoadOptions {
    LoadOptions::default()
}

#[test]
fn views_see_what_any_number_of_ranks_saved_and_the_rest_of_the_storage_stays() {
    let dir = tempfile::tempdir().unwrap();
    for saved in [1, 3] {
        let path = dir.path().join(saved.to_string());
        save_on(&path, saved);
        for world in 1..=5 {
            run_local(world, |group| {
                let flat = arange(1000, FLAT);
                let mut live = state(&flat, &group, 0);
                let own = live.get("own").and_then(StateValue::as_tensor).unwrap().clone();
                let report = load_in_place(path.as_path(), &mut live, &group, &options()).unwrap();
                assert!(report.is_clean(), "{report:?}");
                let rows = chunk_range(ROWS, group.world_size(), group.rank());
                let mut expected = arange(1000, FLAT).to_vec1::<f32>().unwrap();
                let saved = arange(0, FLAT).to_vec1::<f32>().unwrap();
                for at in (rows.start * 4..rows.end * 4).chain(ROWS * 4 + 1..FLAT) {
                    expected[at] = saved[at];
                }
                assert_eq!(flat.to_vec1::<f32>().unwrap(), expected);
                assert_eq!(own.to_vec2::<f64>().unwrap(), [[7.0; 3]; 2]);
                assert_eq!(live.get("value").and_then(StateValue::as_plain), Some(&PlainValue::Int(7)));
                let Some(StateValue::Raw(raw)) = live.get("raw") else { panic!("{live:?}") };
                assert_eq!(raw.bytes(), [1, 1]);
                // The dict is what a load into fresh memory gives.
                let mut fresh = state(&arange(1000, FLAT), &group, 0);
                load(path.as_path(), &mut fresh, &group, &options()).unwrap();
                assert_eq!(format!("{live:?}"), format!("{fresh:?}"));
            })
            .unwrap();
        }
    }
}

#[test]
fn tensors_that_cannot_be_filled_directly_get_their_values_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    run_local(1, |group| {
        let mut state = StateDict::new();
        state.insert("cast", arange(0, 4));
        state.insert("first", arange(10, 3));
        state.insert("alias", arange(10, 3));
        state.insert("part", arange(11, 2));
        save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
        // Half the width, one storage under two names, and a part of it.
        let cast = Tensor::zeros(4, DType::BF16, &Device::Cpu).unwrap();
        let shared = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let mut live = StateDict::new();
        live.insert("cast", cast.clone());
        live.insert("first", shared.clone());
        live.insert("alias", shared.clone());
        live.insert("part", shared.narrow(0, 1, 2).unwrap());
        let error = load_in_place(path.as_path(), &mut live, &group, &options()).unwrap_err();
        assert!(error.to_string().contains("cast"), "{error}");
        // What is cast is read elsewhere first, but has to fit all the same.
        let mut spread = live.clone();
        let column = Tensor::zeros((4, 2), DType::BF16, &Device::Cpu).unwrap().narrow(1, 0, 1).unwrap();
        spread.insert("cast", column.squeeze(1).unwrap());
        let allow_cast = LoadOptions { allow_cast: true, ..options() };
        let error = load_in_place(path.as_path(), &mut spread, &group, &allow_cast).unwrap_err();
        assert!(error.to_string().contains("`cast` cannot be loaded in place: a tensor of shape [4]"), "{error}");
        assert_eq!(shared.to_vec1::<f32>().unwrap(), [0.0; 3]);
        load_in_place(path.as_path(), &mut live, &group, &allow_cast).unwrap();
        let widened = cast.to_dtype(DType::F32).unwrap();
        assert_eq!(widened.to_vec1::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(shared.to_vec1::<f32>().unwrap(), [10.0, 11.0, 12.0]);
    })
    .unwrap();
}

/// The files of tensor data, in order.
fn data_files(path: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "distcp"));
    files.sort();
    files
}

/// Loads in place on two ranks, of which each must get an error; returns rank 0's, and whether any tensor has changed.
fn fails(path: &Path, change: impl Fn(&mut StateDict, usize) + Sync) -> (CheckpointError, bool) {
    let outcomes = run_local(2, |group| {
        let flat = arange(1000, FLAT);
        let mut live = state(&flat, &group, 0);
        change(&mut live, group.rank());
        let before = format!("{live:?}");
        let error = load_in_place(path, &mut live, &group, &options()).unwrap_err();
        // No storage is left behind.
        let changed = flat.to_vec1::<f32>().unwrap() != arange(1000, FLAT).to_vec1::<f32>().unwrap();
        (error, changed || format!("{live:?}") != before)
    })
    .unwrap();
    let kinds: Vec<ErrorKind> = outcomes.iter().map(|(error, _)| error.kind()).collect();
    assert_eq!(kinds[0], kinds[1]);
    let changed = outcomes.iter().any(|(_, changed)| *changed);
    (outcomes.into_iter().next().unwrap().0, changed)
}

#[test]
fn what_does_not_fit_one_rank_is_every_rank_s_error_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    save_on(&path, 2);
    type Change = fn(&mut StateDict);
    let changes: [(&str, Change); 4] = [
        ("unknown", |state| drop(state.insert("unknown", arange(0, 1)))),
        ("own", |state| drop(state.insert("own", Tensor::zeros((3, 2), DType::F64, &Device::Cpu).unwrap()))),
        ("own", |state| drop(state.insert("own", Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap()))),
        ("`own` cannot be loaded in place", |state| {
            let tensor = Tensor::zeros((3, 2), DType::F64, &Device::Cpu).unwrap();
            state.insert("own", tensor.t().unwrap());
        }),
    ];
    for (what, change) in changes {
        let (error, changed) = fails(&path, |state, rank| {
            if rank == 1 {
                change(state);
            }
        });
        let text = format!("{error} {:?}", std::error::Error::source(&error));
        assert!(text.contains(what), "{text}");
        assert!(!changed, "{what}");
    }
    // Files that are cut short or missing are seen before any byte is read.
    let file = &data_files(&path)[1];
    let bytes = fs::read(file).unwrap();
    fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
    let (error, changed) = fails(&path, |_, _| ());
    assert!(!changed && error.kind() == ErrorKind::Corrupt, "{error:?}");
    fs::remove_file(file).unwrap();
    let (error, changed) = fails(&path, |_, _| ());
    assert!(!changed && error.kind() == ErrorKind::Incomplete, "{error:?}");
}

#[test]
fn damage_that_only_reading_shows_is_told_and_a_whole_checkpoint_mends_it() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, damaged) = (dir.path().join("whole"), dir.path().join("damaged"));
    save_on(&whole, 2);
    save_on(&damaged, 2);
    // The last byte of the payloads that rank 1 wrote; its end is the archive's.
    let file = &data_files(&damaged)[1];
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(file, bytes).unwrap();
    let (error, _) = fails(&damaged, |_, _| ());
    assert!(matches!(error, CheckpointError::PartlyLoaded { .. }), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    run_local(2, |group| {
        let flat = arange(1000, FLAT);
        let mut live = state(&flat, &group, 0);
        load_in_place(damaged.as_path(), &mut live, &group, &options()).unwrap_err();
        load_in_place(whole.as_path(), &mut live, &group, &options()).unwrap();
        assert_eq!(flat.to_vec1::<f32>().unwrap()[ROWS * 4 + 1], (ROWS * 4 + 1) as f32);
    })
    .unwrap();
}

#[test]
fn training_goes_on_from_what_was_loaded_under_a_model_and_its_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    for (saved, use_orig_params) in [(1, true), (2, false), (3, true)] {
        let path = dir.path().join(saved.to_string());
        let went_on = run_local(saved, |group| {
            let (model, mut optimizer) = new_model(&group, use_orig_params, &adamw(), 1);
            (0..2).for_each(|seed| _ = step(&model, &mut optimizer, seed));
            save(path.as_path(), &views(&model, &optimizer), &group, &SaveOptions::default()).unwrap();
            (2..5).map(|seed| step(&model, &mut optimizer, seed)).collect::<Vec<f32>>()
        })
        .unwrap();
        for world in [1, 2, 3] {
            let loaded = run_local(world, |group| {
                let (model, mut optimizer) = new_model(&group, !use_orig_params, &adamw(), 2);
                // As many steps as were saved: the step counts are plain values in the dict, not tensors of the optimizer.
                (5..7).for_each(|seed| _ = step(&model, &mut optimizer, seed));
                load_in_place(path.as_path(), &mut views(&model, &optimizer), &group, &options()).unwrap();
                (2..5).map(|seed| step(&model, &mut optimizer, seed)).collect::<Vec<f32>>()
            })
            .unwrap();
            for (loaded, expected) in loaded[0].iter().zip(&went_on[0]) {
                assert!((loaded - expected).abs() <= 1e-6 * expected.abs(), "{saved} to {world}: {loaded}, {expected}");
            }
        }
    }
    let whole = load_whole(dir.path().join("1"), &["model"], &options()).unwrap();
    assert!(whole.dict("model").is_some());
}

fn load_either(
    in_place: bool,
    path: &Path,
    state: &mut StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<LoadReport, CheckpointError> {
    if in_place { load_in_place(path, state, group, options) } else { load(path, state, group, options) }
}

/// Bytes have no number that a float could take, nor may the bytes of one dtype be taken for another's.
#[test]
fn what_cannot_be_cast_is_found_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    save_on(&path, 2);
    let f32 = || Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap().into();
    let u8 = || StateValue::Raw(RawTensor::new(fsdp_layout::DType::I8, vec![2], vec![5, 5]).unwrap());
    for wanted in [f32 as fn() -> StateValue, u8] {
        for in_place in [true, false] {
            let outcomes = run_local(2, |group| {
                let flat = arange(1000, FLAT);
                let mut live = state(&flat, &group, 0);
                if group.rank() == 1 {
                    live.insert("raw", wanted());
                }
                let options = LoadOptions { allow_cast: true, ..options() };
                let error = load_either(in_place, &path, &mut live, &group, &options).unwrap_err();
                assert_eq!(flat.to_vec1::<f32>().unwrap(), arange(1000, FLAT).to_vec1::<f32>().unwrap());
                error
            })
            .unwrap();
            let cast = CheckpointError::from(fsdp_dcp::FileError::from(LoadPlanError::Cast {
                fqn: "raw".to_owned(),
                saved: fsdp_layout::DType::Bool,
                wanted: if matches!(wanted(), StateValue::Raw(_)) {
                    fsdp_layout::DType::I8
                } else {
                    fsdp_layout::DType::F32
                },
            }));
            assert!(outcomes[1].to_string().ends_with(&cast.to_string()), "{}", outcomes[1]);
            assert_eq!(outcomes[0].kind(), outcomes[1].kind());
        }
    }
}

/// Also those that candle keeps and does not compute with.
#[test]
fn every_dtype_of_candle_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    let state = |fill: u8| -> StateDict {
        let tensor = |dtype: DType| {
            let tensor = zeros(&[3, 5], dtype).unwrap();
            with_bytes_mut(&tensor, |bytes| {
                bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = fill.wrapping_mul(at as u8));
            })
            .unwrap();
            (format!("{dtype:?}"), StateValue::Tensor(tensor))
        };
        PLAIN_DTYPES.iter().map(|dtype| tensor(*dtype)).collect()
    };
    let bytes = |state: &StateDict| -> Vec<Vec<u8>> {
        let tensors = state.iter().map(|(_, value)| value.as_tensor().unwrap());
        tensors.map(|tensor| with_bytes(tensor, <[u8]>::to_vec).unwrap()).collect()
    };
    let saved = state(3);
    run_local(1, |group| save(path.as_path(), &saved, &group, &SaveOptions::default()).map(drop)).unwrap()[0]
        .as_ref()
        .unwrap();
    for in_place in [true, false] {
        run_local(2, |group| {
            let mut live = state(0);
            load_either(in_place, &path, &mut live, &group, &options()).unwrap();
            assert_eq!(bytes(&live), bytes(&saved));
        })
        .unwrap();
    }
}
