//! Loading into the memory of the live tensors: the same values as a load into fresh memory, for
//! every tensor that shares the storage; nothing changes where the checkpoint does not fit, and
//! damage is told apart.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, LoadOptions, SaveOptions, Stateful as _, load, load_in_place, load_whole, save,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::{HostBytes, HostBytesMut, PLAIN_DTYPES, zeros};
use fsdp_flat::{LocalShard, RawTensor, ShardedTensor};
use fsdp_formats::checkpoint::open;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::shard::chunk_range;
use fsdp_layout::{ErrorKind, Failure, PlainValue, TensorBox};
use fsdp_state::{LoadReport, StateDict, StateError, StateValue, create_cpu_state_dict};

use crate::in_place::training::{adamw, new_run, step};

const ROWS: usize = 9;

fn arange(start: usize, count: usize) -> Tensor {
    Tensor::arange(start as f32, (start + count) as f32, &Device::Cpu).unwrap()
}

/// Makes the state of a rank, in a flat storage and beside it: rows of a matrix and a vector in the
/// one, a tensor of its own, one without elements, a value and bytes.
fn state(flat: &Tensor, group: &ProcessGroup, value: i64) -> StateDict {
    let rows = chunk_range(ROWS, group.world_size(), group.rank());
    let shards = (!rows.is_empty()).then(|| LocalShard {
        bounds: TensorBox::new(vec![rows.start, 0], vec![rows.len(), 4]),
        tensor: flat
            .narrow(0, rows.start * 4, rows.len() * 4)
            .unwrap()
            .reshape((rows.len(), 4))
            .unwrap(),
    });
    let matrix =
        ShardedTensor::new(DType::F32, vec![ROWS, 4], shards.into_iter().collect()).unwrap();
    let mut inner = StateDict::new();
    inner.insert("matrix", matrix);
    inner.insert("vector", flat.narrow(0, ROWS * 4 + 1, 5).unwrap());
    let mut state = StateDict::new();
    state.insert("inner", inner);
    state.insert(
        "own",
        Tensor::full(value as f64, (2, 3), &Device::Cpu).unwrap(),
    );
    state.insert(
        "empty",
        Tensor::zeros((0, 2), DType::F32, &Device::Cpu).unwrap(),
    );
    state.insert(
        "raw",
        RawTensor::new(fsdp_layout::DType::Bool, vec![2], vec![1, value as u8 % 2]).unwrap(),
    );
    state.insert("value", value);
    state
}

const FLAT: usize = ROWS * 4 + 1 + 5;

fn save_on(path: &Path, world: usize) {
    run_local(world, |group| {
        save(
            path,
            &state(&arange(0, FLAT), &group, 7),
            &group,
            &SaveOptions::default(),
        )
        .unwrap();
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
                let own = live
                    .get("own")
                    .and_then(StateValue::as_tensor)
                    .unwrap()
                    .clone();
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
                assert_eq!(
                    live.get("value").and_then(StateValue::as_plain),
                    Some(&PlainValue::Int(7))
                );
                let Some(StateValue::Raw(raw)) = live.get("raw") else {
                    panic!("{live:?}")
                };
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
        // A tensor that is cast is read elsewhere first, but has to fit all the same.
        let mut spread = live.clone();
        let column = Tensor::zeros((4, 2), DType::BF16, &Device::Cpu)
            .unwrap()
            .narrow(1, 0, 1)
            .unwrap();
        spread.insert("cast", column.squeeze(1).unwrap());
        let allow_cast = LoadOptions {
            cast: true,
            ..options()
        };
        let error = load_in_place(path.as_path(), &mut spread, &group, &allow_cast).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("`cast` cannot be loaded in place: a tensor of shape [4]"),
            "{error}"
        );
        assert_eq!(shared.to_vec1::<f32>().unwrap(), [0.0; 3]);
        load_in_place(path.as_path(), &mut live, &group, &allow_cast).unwrap();
        let widened = cast.to_dtype(DType::F32).unwrap();
        assert_eq!(widened.to_vec1::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(shared.to_vec1::<f32>().unwrap(), [10.0, 11.0, 12.0]);
    })
    .unwrap();
}

/// A tied parameter that is cut in several boxes, beside another tensor.
#[test]
fn names_of_one_tensor_of_several_boxes_are_filled_once_and_others_keep_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    let boxes = [
        TensorBox::new(vec![0, 1], vec![1, 2]),
        TensorBox::new(vec![1, 0], vec![1, 3]),
    ];
    run_local(1, |group| {
        let matrix =
            |start: usize| ShardedTensor::from_whole(&arange(start, 6).reshape((2, 3)).unwrap());
        let saved: StateDict = [("a", 0), ("b", 0), ("c", 10), ("d", 0)]
            .map(|(key, start)| (key, StateValue::Sharded(matrix(start))))
            .into_iter()
            .collect();
        save(path.as_path(), &saved, &group, &SaveOptions::default()).unwrap();
        let tied = ShardedTensor::zeros(DType::F32, &[2, 3], &boxes).unwrap();
        let other = ShardedTensor::zeros(DType::F32, &[2, 3], &boxes).unwrap();
        let mut live: StateDict = [("a", &tied), ("b", &tied), ("c", &other), ("d", &tied)]
            .map(|(key, tensor)| (key, StateValue::Sharded(tensor.clone())))
            .into_iter()
            .collect();
        load_in_place(path.as_path(), &mut live, &group, &options()).unwrap();
        let values = |tensor: &ShardedTensor| -> Vec<f32> {
            let shards = tensor.shards().iter();
            shards
                .flat_map(|shard| {
                    shard
                        .tensor
                        .flatten_all()
                        .unwrap()
                        .to_vec1::<f32>()
                        .unwrap()
                })
                .collect()
        };
        assert_eq!(values(&tied), [1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(values(&other), [11.0, 12.0, 13.0, 14.0, 15.0]);
    })
    .unwrap();
}

/// A checkpoint of a model whose weights were not tied, say.
#[test]
fn several_names_of_one_tensor_must_have_the_same_values_however_it_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    run_local(2, |group| {
        let saved: StateDict = [("a", 0), ("b", 10)]
            .map(|(key, start)| (key, arange(start, 3).into()))
            .into_iter()
            .collect();
        save(path.as_path(), &saved, &group, &SaveOptions::default()).unwrap();
        for (staged, read_once) in [(false, false), (true, false), (false, true), (true, true)] {
            let tied = arange(90, 3);
            let mut live: StateDict = ["b", "a"]
                .into_iter()
                .map(|key| (key, tied.clone().into()))
                .collect();
            let options = LoadOptions {
                staged,
                read_once: Some(read_once),
                ..options()
            };
            let error = load_in_place(path.as_path(), &mut live, &group, &options).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("`a` and `b`"), "{error}");
            assert_eq!(
                tied.to_vec1::<f32>().unwrap(),
                [90.0, 91.0, 92.0],
                "staged {staged}, read once {read_once}"
            );
        }
    })
    .unwrap();
}

#[test]
fn where_tensors_share_some_elements_the_later_name_counts_however_they_are_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    run_local(2, |group| {
        let saved: StateDict = [("a", arange(0, 3)), ("b", arange(10, 2))]
            .map(|(key, tensor)| (key, tensor.into()))
            .into_iter()
            .collect();
        save(path.as_path(), &saved, &group, &SaveOptions::default()).unwrap();
        for (staged, read_once) in [(false, false), (true, false), (false, true), (true, true)] {
            let whole = arange(90, 3);
            let part = whole.narrow(0, 1, 2).unwrap();
            let mut live: StateDict = [("b", part), ("a", whole.clone())]
                .map(|(key, tensor)| (key, tensor.into()))
                .into_iter()
                .collect();
            let options = LoadOptions {
                staged,
                read_once: Some(read_once),
                ..options()
            };
            load_in_place(path.as_path(), &mut live, &group, &options).unwrap();
            assert_eq!(
                whole.to_vec1::<f32>().unwrap(),
                [0.0, 10.0, 11.0],
                "staged {staged}, read once {read_once}"
            );
        }
    })
    .unwrap();
}

#[test]
fn a_plain_value_takes_the_place_of_a_tensor_only_where_nobody_shares_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    run_local(2, |group| {
        let saved: StateDict = [("scale", 0.5.into())].into_iter().collect();
        save(path.as_path(), &saved, &group, &SaveOptions::default()).unwrap();
        let scale = Tensor::new(2f32, &Device::Cpu).unwrap();
        let mut live: StateDict = [("scale", scale.clone().into())].into_iter().collect();
        let error = load_in_place(path.as_path(), &mut live, &group, &options())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`scale: saved plain value, current float32 []`"),
            "{error}"
        );
        assert!(
            live.get("scale").is_some_and(StateValue::is_tensor)
                && scale.to_scalar::<f32>().unwrap() == 2.0
        );
        load(path.as_path(), &mut live, &group, &options()).unwrap();
        assert_eq!(live.plain_at(&["scale"]), Some(&PlainValue::Float(0.5)));
    })
    .unwrap();
}

/// Returns the files of tensor data, in order.
fn data_files(path: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|file| {
        file.extension()
            .is_some_and(|extension| extension == "distcp")
    });
    files.sort();
    files
}

/// Loads in place on two ranks, of which each must get an error; returns rank 0's, and whether any
/// tensor has changed.
fn fails(path: &Path, change: impl Fn(&mut StateDict, usize) + Sync) -> (CheckpointError, bool) {
    let outcomes = run_local(2, |group| {
        let flat = arange(1000, FLAT);
        let mut live = state(&flat, &group, 0);
        change(&mut live, group.rank());
        let before = format!("{live:?}");
        let error = load_in_place(path, &mut live, &group, &options()).unwrap_err();
        // No storage is left behind.
        let changed =
            flat.to_vec1::<f32>().unwrap() != arange(1000, FLAT).to_vec1::<f32>().unwrap();
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
        ("unknown", |state| {
            drop(state.insert("unknown", arange(0, 1)))
        }),
        ("own", |state| {
            drop(state.insert(
                "own",
                Tensor::zeros((3, 2), DType::F64, &Device::Cpu).unwrap(),
            ))
        }),
        ("own", |state| {
            drop(state.insert(
                "own",
                Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap(),
            ))
        }),
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
    assert!(
        !changed && error.kind() == ErrorKind::Incomplete,
        "{error:?}"
    );
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
    assert!(
        matches!(
            error,
            CheckpointError::State(StateError::PartlyLoaded { .. })
        ),
        "{error:?}"
    );
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    run_local(2, |group| {
        let flat = arange(1000, FLAT);
        let mut live = state(&flat, &group, 0);
        load_in_place(damaged.as_path(), &mut live, &group, &options()).unwrap_err();
        load_in_place(whole.as_path(), &mut live, &group, &options()).unwrap();
        assert_eq!(
            flat.to_vec1::<f32>().unwrap()[ROWS * 4 + 1],
            (ROWS * 4 + 1) as f32
        );
    })
    .unwrap();
}

#[test]
fn training_goes_on_from_what_was_loaded_under_a_model_and_its_optimizer() {
    let dir = tempfile::tempdir().unwrap();
    for (saved, use_orig_params) in [(1, true), (2, false), (3, true)] {
        let path = dir.path().join(saved.to_string());
        let went_on = run_local(saved, |group| {
            let mut run = new_run(&group, use_orig_params, &adamw(), 1);
            (0..2).for_each(|seed| _ = step(&mut run, seed));
            save(
                path.as_path(),
                &run.state_dict().unwrap(),
                &group,
                &SaveOptions::default(),
            )
            .unwrap();
            (2..5)
                .map(|seed| step(&mut run, seed))
                .collect::<Vec<f32>>()
        })
        .unwrap();
        for world in [1, 2, 3] {
            let loaded = run_local(world, |group| {
                let mut run = new_run(&group, !use_orig_params, &adamw(), 2);
                (5..7).for_each(|seed| _ = step(&mut run, seed));
                // Steps and hyperparameters in the run's dict are copies, so that they would be
                // lost.
                let mut state = run.state_dict().unwrap();
                let error = load_in_place(path.as_path(), &mut state, &group, &options())
                    .unwrap_err()
                    .to_string();
                assert!(error.contains("`optim`"), "{error}");
                assert!(error.contains("`TrainState::load_state_dict`"), "{error}");
                // A copy on the host belongs to nobody else.
                let mut copy = create_cpu_state_dict(&state).unwrap();
                load_in_place(path.as_path(), &mut copy, &group, &options()).unwrap();
                // So they would in a list of runs.
                let runs = StateValue::List(vec![run.state_dict().unwrap().into()]);
                let mut runs: StateDict = [("runs", runs)].into_iter().collect();
                let error = load_in_place(path.as_path(), &mut runs, &group, &options())
                    .unwrap_err()
                    .to_string();
                assert!(error.contains("`runs.0.optim`"), "{error}");
                let checkpoint = open(path.as_path(), OpenOptions::default()).unwrap();
                run.load_state_dict(&*checkpoint, &group, &options())
                    .unwrap();
                (2..5)
                    .map(|seed| step(&mut run, seed))
                    .collect::<Vec<f32>>()
            })
            .unwrap();
            for (loaded, expected) in loaded[0].iter().zip(&went_on[0]) {
                assert!(
                    (loaded - expected).abs() <= 1e-6 * expected.abs(),
                    "{saved} to {world}: {loaded}, {expected}"
                );
            }
        }
    }
    let whole = load_whole(dir.path().join("1"), &["model"], &options()).unwrap();
    assert!(whole.dict("model").is_some());
}

/// An empty dict leaves no trace in a checkpoint, so the list that held it comes back with `None`
/// in its place.
#[test]
fn a_gap_in_a_list_is_no_obstacle_to_loading_all_of_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    let last: StateDict = [("last_epoch", 3i64.into())].into_iter().collect();
    let schedulers = StateValue::List(vec![StateDict::new().into(), last.into()]);
    let state: StateDict = [("schedulers", schedulers)].into_iter().collect();
    run_local(1, |group| {
        save(path.as_path(), &state, &group, &SaveOptions::default())
            .map(drop)
            .unwrap()
    })
    .unwrap();
    let whole = load_whole(path.as_path(), &[], &options()).unwrap();
    let Some(StateValue::List(schedulers)) = whole.get("schedulers") else {
        panic!("{whole:?}")
    };
    let last = schedulers[1]
        .as_dict()
        .and_then(|dict| dict.plain_at(&["last_epoch"]))
        .and_then(PlainValue::as_int);
    assert_eq!((schedulers.len(), last), (2, Some(3)));
}

#[test]
fn a_prefix_selects_values_also_in_a_format_without_paths() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let tensors = ["model.weight", "model.bias", "models.weight", "model"]
        .map(|name| (name.to_owned(), arange(0, 2)));
    candle_core::safetensors::save(&HashMap::from(tensors), &path).unwrap();
    let keys = |prefix: &[&str]| -> Vec<String> {
        let whole = load_whole(path.as_path(), prefix, &options()).unwrap();
        whole.keys().map(str::to_owned).collect()
    };
    assert_eq!(keys(&["model"]), ["model", "model.bias", "model.weight"]);
    assert_eq!(keys(&["model", "bias"]), ["model.bias"]);
    assert_eq!(keys(&[]).len(), 4);
}

fn load_either(
    in_place: bool,
    path: &Path,
    state: &mut StateDict,
    group: &ProcessGroup,
    options: &LoadOptions,
) -> Result<LoadReport, CheckpointError> {
    if in_place {
        load_in_place(path, state, group, options)
    } else {
        load(path, state, group, options)
    }
}

/// Bytes have no number that a float could take, nor may the bytes of one dtype be taken for
/// another's.
#[test]
fn what_cannot_be_cast_is_found_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    save_on(&path, 2);
    let f32 = || Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap().into();
    let u8 =
        || StateValue::Raw(RawTensor::new(fsdp_layout::DType::I8, vec![2], vec![5, 5]).unwrap());
    for wanted in [f32 as fn() -> StateValue, u8] {
        for in_place in [true, false] {
            let outcomes = run_local(2, |group| {
                let flat = arange(1000, FLAT);
                let mut live = state(&flat, &group, 0);
                if group.rank() == 1 {
                    live.insert("raw", wanted());
                }
                let options = LoadOptions {
                    cast: true,
                    ..options()
                };
                let error = load_either(in_place, &path, &mut live, &group, &options).unwrap_err();
                assert_eq!(
                    flat.to_vec1::<f32>().unwrap(),
                    arange(1000, FLAT).to_vec1::<f32>().unwrap()
                );
                error
            })
            .unwrap();
            let becomes = if matches!(wanted(), StateValue::Raw(_)) {
                "int8"
            } else {
                "float32"
            };
            let cast = format!("mismatched `raw: saved bool [2], current {becomes} [2]`");
            assert!(
                outcomes
                    .iter()
                    .all(|error| error.to_string().contains(&cast)),
                "{}",
                outcomes[1]
            );
            assert_eq!(outcomes[1].kind(), ErrorKind::Difference);
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
            let mut bytes = HostBytesMut::write(&tensor).unwrap();
            bytes
                .iter_mut()
                .enumerate()
                .for_each(|(at, byte)| *byte = fill.wrapping_mul(at as u8));
            bytes.finish().unwrap();
            (format!("{dtype:?}"), StateValue::Tensor(tensor))
        };
        PLAIN_DTYPES.iter().map(|dtype| tensor(*dtype)).collect()
    };
    let bytes = |state: &StateDict| -> Vec<Vec<u8>> {
        let tensors = state.iter().map(|(_, value)| value.as_tensor().unwrap());
        tensors
            .map(|tensor| HostBytes::read(tensor).unwrap().to_vec())
            .collect()
    };
    let saved = state(3);
    run_local(1, |group| {
        save(path.as_path(), &saved, &group, &SaveOptions::default()).map(drop)
    })
    .unwrap()[0]
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

#[test]
fn what_the_checkpoint_has_no_value_for_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    run_local(2, |group| {
        let mut state = StateDict::new();
        state.insert("weight", arange(0, 3));
        state.insert("state", StateDict::new());
        save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
        state.insert("losses", StateValue::List(vec![1.0.into()]));
        let options = LoadOptions {
            strict: false,
            ..options()
        };
        for in_place in [false, true] {
            let mut loaded = state.copy().unwrap();
            load_either(in_place, &path, &mut loaded, &group, &options).unwrap();
            assert!(
                loaded.dict("state").is_some_and(StateDict::is_empty),
                "{loaded:?}"
            );
            assert!(
                matches!(loaded.get("losses"), Some(StateValue::List(list)) if list.len() == 1),
                "{loaded:?}"
            );
        }
    })
    .unwrap();
}

/// Pipeline stages have names of their own.
#[test]
fn ranks_may_ask_for_different_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    run_local(2, |group| {
        let state: StateDict = ["a", "b", "c"]
            .into_iter()
            .enumerate()
            .map(|(i, key)| (key, arange(i, 3).into()))
            .collect();
        save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
        for in_place in [false, true] {
            let key = ["a", "c"][group.rank()];
            let mut mine: StateDict = [(key, arange(9, 3).into())].into_iter().collect();
            let report = load_either(in_place, &path, &mut mine, &group, &options()).unwrap();
            // A key that another rank asks for is not unexpected.
            assert!(
                report.unexpected == ["b"] && report.missing.is_empty(),
                "{report:?}"
            );
            let found = mine.get(key).and_then(StateValue::as_tensor).unwrap();
            assert_eq!(
                found.to_vec1::<f32>().unwrap()[0],
                2.0 * group.rank() as f32
            );
            // A key that one rank alone lacks is every rank's error.
            mine.insert(["a", "d"][group.rank()], arange(9, 3));
            let error = load_either(in_place, &path, &mut mine, &group, &options())
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("rank 1") && error.contains("missing key(s) `d`"),
                "{error}"
            );
        }
    })
    .unwrap();
}
