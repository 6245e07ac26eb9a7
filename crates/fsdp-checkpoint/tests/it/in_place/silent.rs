//! Faults that other programs had without a word, each with the thread in which it was reported: a
//! load that is not what was saved is an error here, a save that is not what the run holds has
//! another digest, replicas that differ are named.
//!
//! Each test makes the effect of a fault on the state; the code that had the fault is not here.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, LoadOptions, SaveOptions, Stateful as _, check_replicas, load_in_place, save,
    state_digest,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_digest::StateDigest;
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::HostSliceMut;
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::{Checkpoint, Format, open};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::reader::{OpenOptions, Slot};
use fsdp_formats::storage::CheckedDirectory;
use fsdp_layout::PlainValue;
use fsdp_nn::ShardingStrategy;
use fsdp_state::{
    StateDict, StateError, StateValue, WrongTensor, digest_state_dict, flatten_state_dict,
};

use crate::in_place::training::{Run, adamw, new_run_with, step};

/// A fault of a load, and the names that it concerns.
enum Fault {
    /// It takes what belongs to another name.
    Swapped(&'static str, &'static str),
    /// It takes what an older checkpoint has.
    Older(&'static str),
    /// It leaves zeros, as a fresh optimizer has.
    Zeros(&'static str),
    /// It does nothing.
    Nothing(&'static str),
    /// It takes the rows of a tensor in another order.
    Rotated(&'static str),
    /// It takes another value.
    Value(&'static str, PlainValue),
}

/// A checkpoint whose reader has a fault.
struct Faulty<'a> {
    checkpoint: &'a dyn Checkpoint,
    older: &'a dyn Checkpoint,
    fault: &'a Fault,
}

impl Checkpoint for Faulty<'_> {
    fn format(&self) -> Format {
        self.checkpoint.format()
    }

    fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    fn metadata(&self) -> &Metadata {
        self.checkpoint.metadata()
    }

    fn directory(&self) -> &CheckedDirectory {
        self.checkpoint.directory()
    }

    fn digests(&self) -> Option<&StateDigest> {
        self.checkpoint.digests()
    }

    fn read_boxes(&self, fqn: &str, slots: &mut [Slot<'_>]) -> Result<(), FileError> {
        match self.fault {
            Fault::Swapped(a, b) if fqn.contains(a) => {
                self.checkpoint.read_boxes(&fqn.replace(a, b), slots)
            }
            Fault::Swapped(a, b) if fqn.contains(b) => {
                self.checkpoint.read_boxes(&fqn.replace(b, a), slots)
            }
            Fault::Older(part) if fqn.contains(part) => self.older.read_boxes(fqn, slots),
            Fault::Zeros(part) if fqn.contains(part) => {
                for slot in slots {
                    slot.bytes.fill(0);
                    slot.filled(0..slot.bytes.len());
                }
                Ok(())
            }
            Fault::Nothing(part) if fqn.contains(part) => Ok(()),
            Fault::Rotated(part) if fqn.contains(part) => {
                for slot in slots {
                    self.checkpoint
                        .read_boxes(fqn, &mut [Slot::new(slot.bounds.clone(), slot.bytes)])?;
                    slot.bytes.rotate_left(4);
                    slot.filled(0..slot.bytes.len());
                }
                Ok(())
            }
            _ => self.checkpoint.read_boxes(fqn, slots),
        }
    }

    fn read_value(&self, fqn: &str) -> Result<PlainValue, FileError> {
        match self.fault {
            Fault::Value(part, value) if fqn.contains(part) => Ok(value.clone()),
            _ => self.checkpoint.read_value(fqn),
        }
    }
}

fn new_run(group: &ProcessGroup, seed: u64) -> Run {
    let mut run = new_run_with(group, ShardingStrategy::FullShard, &adamw(), seed);
    run.values.insert("epoch", 0i64);
    run.values.insert("scaler", 2048.0f64);
    run
}

/// Saves a run after its first and its second step.
fn two_checkpoints(directory: &Path, ranks: usize) {
    run_local(ranks, |group| {
        let mut run = new_run(&group, 3);
        for number in 1..=2i64 {
            step(&mut run, number as usize);
            run.values.insert("epoch", number);
            run.values.insert("scaler", 1024.0 / number as f64);
            let path = directory.join(number.to_string());
            save(
                path,
                &run.state_dict().unwrap(),
                &group,
                &SaveOptions::default(),
            )
            .unwrap();
        }
    })
    .unwrap();
}

#[test]
fn loads_that_other_programs_had_wrong_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    two_checkpoints(directory.path(), 2);
    let faults = [
        // No fault, and no error.
        ("", Fault::Swapped("nothing", "nobody"), ""),
        // Ranks gathered the optimizer's states in another order each.
        (
            "pytorch/pytorch#84654",
            Fault::Swapped("exp_avg_sq", "exp_avg"),
            ".exp_avg`",
        ),
        // States were matched to parameters by position.
        (
            "pytorch/pytorch#113673",
            Fault::Swapped("optim.state.a.weight.exp_avg_sq", "model.a.weight"),
            "`model.a.weight`",
        ),
        (
            "facebookresearch/fairscale#380",
            Fault::Swapped("a.weight.exp_avg_sq", "a.weight.exp_avg"),
            "a.weight.exp_avg`",
        ),
        // The newest file of each kind was taken, from two epochs.
        ("NVIDIA/physicsnemo#2012", Fault::Older("model."), "`model."),
        // Moments were dropped, so that the optimizer began anew.
        (
            "areal-project/AReaL#1468",
            Fault::Zeros(".exp_avg"),
            ".exp_avg`",
        ),
        (
            "KempnerInstitute/KempnerForge#115",
            Fault::Zeros(".exp_avg_sq"),
            ".exp_avg_sq`",
        ),
        // The state dict was not filled at all.
        (
            "pytorch/pytorch#118081",
            Fault::Nothing("model."),
            "`model.",
        ),
        // The packed state of an optimizer came back in another order.
        (
            "databricks/flashoptim#3",
            Fault::Rotated("head.weight.exp_avg"),
            "head.weight.exp_avg`",
        ),
        // Values beside tensors were kept as they were.
        (
            "pytorch/pytorch#129079",
            Fault::Value(".lr", PlainValue::Float(0.5)),
            ".lr`",
        ),
        (
            "FabianPlum/SMILify#72",
            Fault::Value("epoch", PlainValue::Int(0)),
            "`epoch`",
        ),
        (
            "huggingface/accelerate#4289",
            Fault::Value("scaler", PlainValue::Float(2048.0)),
            "`scaler`",
        ),
    ];
    for (thread, fault, named) in &faults {
        let errors = run_local(2, |group| {
            let of =
                |number: &str| open(directory.path().join(number), OpenOptions::default()).unwrap();
            let (checkpoint, older) = (of("2"), of("1"));
            let faulty = Faulty {
                checkpoint: &*checkpoint,
                older: &*older,
                fault,
            };
            let mut run = new_run(&group, 9);
            let options = LoadOptions {
                staged: true,
                ..LoadOptions::default()
            };
            let before = state_digest(&run, &group).unwrap();
            let outcome = run.load_state_dict(&faulty, &group, &options);
            // A load that is refused has changed nothing.
            assert_eq!(
                outcome.is_err(),
                state_digest(&run, &group).unwrap() == before,
                "{thread}"
            );
            outcome.err().map(|error| error.to_string())
        })
        .unwrap();
        assert_eq!(errors[0], errors[1], "{thread}");
        let is_named = errors[0]
            .as_ref()
            .map_or(thread.is_empty(), |error| error.contains(named));
        assert!(
            is_named && errors[0].is_none() == thread.is_empty(),
            "{thread}: {errors:?}"
        );
    }
}

type Flat = BTreeMap<String, StateValue>;

/// Returns copies of all values of a run, by their flat keys.
fn copied(run: &Run) -> Flat {
    let flat = flatten_state_dict(&run.state_dict().unwrap().copy().unwrap()).unwrap();
    flat.values.into_iter().collect()
}

fn dict(flat: &Flat) -> StateDict {
    flat.iter()
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// Takes the values whose keys have `part` in them from another state.
fn take(part: &str, from: &Flat, to: &mut Flat) {
    for (key, value) in from.iter().filter(|(key, _)| key.contains(part)) {
        to.insert(key.clone(), value.clone());
    }
}

/// Puts another tensor in the place of one.
fn change(key: &str, state: &mut Flat, change: fn(&Tensor) -> Tensor) {
    let tensor = match &state[key] {
        StateValue::Tensor(tensor) => tensor.clone(),
        StateValue::Sharded(tensor) => tensor.shards()[0].tensor.clone(),
        other => panic!("{other:?}"),
    };
    state.insert(key.to_owned(), StateValue::Tensor(change(&tensor)));
}

fn twice(tensor: &Tensor) -> Tensor {
    Tensor::cat(&[tensor, tensor], 0).unwrap()
}

fn half(tensor: &Tensor) -> Tensor {
    tensor.narrow(0, 0, tensor.dims()[0] / 2).unwrap()
}

/// Makes a state that is wrongly saved in place of the second of three: of all three, the first,
/// the second and the third.
type WrongSave = fn(&Flat, &mut Flat, &Flat);

#[test]
fn saves_that_other_programs_had_wrong_have_another_digest_than_the_run() {
    let cases: [(&str, WrongSave, &str); 10] = [
        // Training went on before the values had been copied.
        (
            "pytorch/pytorch#144657",
            |_, saved, later| take("model.", later, saved),
            "model.",
        ),
        (
            "Lightning-AI/pytorch-lightning#21079",
            |_, saved, later| take("weight", later, saved),
            "weight",
        ),
        (
            "NVIDIA/nvidia-resiliency-ext#376",
            |_, saved, later| take(".step", later, saved),
            ".step",
        ),
        // A plan of the first save was used again with its values.
        (
            "NVIDIA-NeMo/RL#3312",
            |earlier, saved, _| take("", earlier, saved),
            "",
        ),
        // The loaded state was saved again, although training had changed it.
        (
            "pytorch/torchtitan#647",
            |earlier, saved, _| take("optim.", earlier, saved),
            "optim.",
        ),
        // Averaged weights were in the model while it was saved.
        (
            "atomistic-machine-learning/schnetpack#785",
            |earlier, saved, _| take("model.a.", earlier, saved),
            "model.a.",
        ),
        // Frozen parameters lost their optimizer's state.
        (
            "pytorch/pytorch#192202",
            |_, saved, _| saved.retain(|key, _| !key.contains("state.head.")),
            "state.head.",
        ),
        // The number of steps was read when the save had ended, not when it began.
        (
            "NVIDIA-NeMo/Megatron-Bridge#5738",
            |_, saved, later| take("epoch", later, saved),
            "epoch",
        ),
        // A tensor of which every rank has a copy was put together from all copies.
        (
            "verl-project/verl#7610",
            |_, saved, _| change("model.a.bias", saved, twice),
            "model.a.bias",
        ),
        // Shards that happened to be equal were taken for copies, and all but one were left out.
        (
            "EvolvingLMMs-Lab/lmms-engine#160",
            |_, saved, _| change("model.a.bias", saved, half),
            "model.a.bias",
        ),
    ];
    let directory = tempfile::tempdir().unwrap();
    run_local(1, |group| {
        let mut run = new_run(&group, 3);
        let mut states = Vec::new();
        for number in 1..=3i64 {
            step(&mut run, number as usize);
            run.values.insert("epoch", number);
            states.push(copied(&run));
        }
        let live = digest_state_dict(&dict(&states[1]), &group).unwrap();
        for (index, (thread, wrong, part)) in cases.into_iter().enumerate() {
            let mut saved = states[1].clone();
            wrong(&states[0], &mut saved, &states[2]);
            let path = directory.path().join(index.to_string());
            let report = save(&*path, &dict(&saved), &group, &SaveOptions::default());
            report.unwrap();
            let checkpoint = open(&*path, OpenOptions::default()).unwrap();
            let differing = checkpoint.digests().unwrap().differing(&live);
            assert!(
                !differing.is_empty() && differing.iter().all(|name| name.contains(part)),
                "{thread}: {differing:?}"
            );
        }
    })
    .unwrap();
}

/// One rank went on from other weights than the rest, as after a load whose last exchange was left
/// out.
#[test]
fn ranks_that_resume_from_different_weights_are_named() {
    // NVIDIA/Megatron-LM#6920
    let errors = run_local(3, |group| {
        let mut run = new_run_with(&group, ShardingStrategy::NoShard, &adamw(), 3);
        step(&mut run, 1);
        if group.rank() == 2 {
            let state = run.state_dict().unwrap();
            let tensor: Option<Tensor> = match state.dict("model").unwrap().get("a.bias").unwrap() {
                StateValue::Tensor(tensor) => Some(tensor.clone()),
                StateValue::Sharded(tensor) => {
                    tensor.shards().first().map(|shard| shard.tensor.clone())
                }
                _ => None,
            };
            HostSliceMut::<f32>::write(&tensor.unwrap()).unwrap()[0] += 1.0;
        }
        match check_replicas(&run, &group) {
            Err(CheckpointError::State(StateError::ReplicasDiffer { tensors })) => tensors,
            outcome => panic!("{outcome:?}"),
        }
    })
    .unwrap();
    let bias = WrongTensor {
        fqn: "model.a.bias".to_owned(),
        ranks: vec![2],
    };
    assert!(
        errors
            .iter()
            .all(|tensors| tensors.len() == 1 && tensors[0] == bias),
        "{errors:?}"
    );
}

/// Nothing was loaded, because all names lay one level deeper than was looked for.
#[test]
fn a_load_that_finds_no_name_is_an_error() {
    // subhc/unsup-parts#12
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nested");
    run_local(1, |group| {
        let weight = ShardedTensor::from_whole(&Tensor::ones(3, DType::F32, &Device::Cpu).unwrap());
        let mut model = StateDict::new();
        model.insert("weight", weight);
        let mut saved = StateDict::new();
        saved.insert("model_state_dict", model.clone());
        save(&*path, &saved, &group, &SaveOptions::default()).unwrap();
        let error = load_in_place(&*path, &mut model, &group, &LoadOptions::default()).unwrap_err();
        assert!(error.to_string().contains("`weight`"), "{error}");
    })
    .unwrap();
}

/// A resume of the weights alone brought the moments of the optimizer along.
#[test]
fn a_load_of_the_weights_leaves_the_optimizer_as_it_is() {
    // GMISWE/tinker-cloud#61
    let directory = tempfile::tempdir().unwrap();
    two_checkpoints(directory.path(), 2);
    run_local(2, |group| {
        let mut run = new_run(&group, 9);
        step(&mut run, 5);
        let before = state_digest(&run, &group).unwrap();
        let checkpoint = open(directory.path().join("2"), OpenOptions::default()).unwrap();
        let optimizers = std::mem::take(&mut run.optimizers);
        let options = LoadOptions {
            strict: false,
            ..LoadOptions::default()
        };
        run.load_state_dict(&*checkpoint, &group, &options).unwrap();
        run.optimizers = optimizers;
        let differing = state_digest(&run, &group).unwrap().differing(&before);
        assert!(
            differing.contains(&"model.a.weight".to_owned()),
            "{differing:?}"
        );
        assert!(
            !differing.iter().any(|name| name.starts_with("optim.")),
            "{differing:?}"
        );
    })
    .unwrap();
}
