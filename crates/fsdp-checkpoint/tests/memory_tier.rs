//! The memory tier of a run, on ranks that have a directory for each host: what is lost, damaged or torn, and where a run goes
//! on from then.

#![expect(clippy::disallowed_methods, reason = "the tests damage files on purpose")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{CheckpointError, Checkpointer, CheckpointerOptions, StepCheckpoint};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_dcp::verify::{Level, verify};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::TensorBox;
use fsdp_state::StateDict;
use tempfile::TempDir;

/// The rows of a tensor that is dealt out to ranks.
const ROWS: usize = 7;

/// The state of a step: rows that are spread over the ranks, a tensor that each rank has, and values, one of a single rank.
fn state(group: &ProcessGroup, step: u64) -> StateDict {
    let (rank, ranks) = (group.rank(), group.world_size());
    let (first, end) = (ROWS * rank / ranks, ROWS * (rank + 1) / ranks);
    let elements: Vec<f32> = (first * 3..end * 3).map(|index| index as f32 + 1000. * step as f32).collect();
    let tensor = Tensor::from_vec(elements, (end - first, 3), &Device::Cpu).unwrap();
    let bounds = TensorBox::new(vec![first, 0], vec![end - first, 3]);
    let mut state = StateDict::new();
    state.insert("rows", ShardedTensor::new(DType::F32, vec![ROWS, 3], vec![LocalShard { bounds, tensor }]).unwrap());
    state.insert("whole", Tensor::full(step as f32, (2, 2), &Device::Cpu).unwrap());
    state.insert("step", step.cast_signed());
    if rank == ranks - 1 {
        state.insert("of the last rank", "a value");
    }
    state
}

/// A run whose ranks are dealt out to hosts, two each.
struct Run(TempDir);

impl Run {
    fn new() -> Self {
        Run(TempDir::new().unwrap())
    }

    fn host(&self, host: usize) -> PathBuf {
        self.0.path().join(format!("host-{host}"))
    }

    fn on_ranks<T: Send>(&self, ranks: usize, f: impl Fn(&mut Checkpointer, &ProcessGroup) -> T + Sync) -> Vec<T> {
        let run = |group: ProcessGroup| {
            let memory_tier = Some(self.host(group.rank() / 2).into());
            let options = CheckpointerOptions { memory_tier, ..CheckpointerOptions::default() };
            f(&mut Checkpointer::new(self.0.path().join("run"), &group, options).unwrap(), &group)
        };
        run_local(ranks, run).unwrap()
    }

    /// Saves steps to memory, as one start of the job.
    fn save(&self, ranks: usize, steps: &[u64]) {
        self.on_ranks(ranks, |checkpointer, group| {
            for &step in steps {
                let report = checkpointer.save_to_memory(step, &state(group, step)).unwrap();
                assert_eq!(report.total_bytes as usize, (ROWS * 3 + ranks * 4) * 4);
            }
        });
    }

    /// Loads the newest state, and returns its step. Every element must be that of the step.
    fn load(&self, ranks: usize) -> Option<u64> {
        let loaded = self.on_ranks(ranks, |checkpointer, group| {
            let mut run = state(group, 0);
            // Another rank may be the last one now.
            run.remove("of the last rank");
            let (StepCheckpoint { step, path }, _) = checkpointer.load_latest(&mut run).unwrap()?;
            let mut expected = state(group, step);
            expected.remove("of the last rank");
            assert_eq!(format!("{:?}", elements(&run)), format!("{:?}", elements(&expected)));
            // It is an ordinary checkpoint, of which every byte has a hash, and which has all values.
            let opened = fsdp_dcp::reader::CheckpointReader::open(&path).unwrap();
            let report = verify(&opened, Level::Hashes, None).unwrap();
            assert!(report.problems.is_empty(), "{:?}", report.problems);
            assert_eq!(opened.read_value("of the last rank").unwrap().as_str(), Some("a value"));
            Some(step)
        });
        assert!(loaded.iter().all(|step| *step == loaded[0]), "{loaded:?}");
        loaded[0]
    }

    /// Returns the directories of parts below the directories of all hosts.
    fn parts(&self) -> Vec<PathBuf> {
        let mut parts: Vec<PathBuf> = (0..4).flat_map(|host| files(&self.host(host))).collect();
        parts.retain(|file| file.ends_with(".metadata"));
        // The others are joined checkpoints.
        let is_part = |part: &PathBuf| part.to_string_lossy().contains("-of-");
        parts.iter().map(|file| file.parent().unwrap().to_owned()).filter(is_part).collect()
    }
}

/// Returns all files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn elements(state: &StateDict) -> Vec<(Vec<f32>, Option<i64>)> {
    let rows = &state.get("rows").unwrap().as_sharded().unwrap().shards()[0].tensor;
    let whole = state.get("whole").unwrap().as_tensor().unwrap();
    let step = state.plain_at(&["step"]).and_then(|step| step.as_int());
    [rows, whole].iter().map(|tensor| (tensor.flatten_all().unwrap().to_vec1().unwrap(), step)).collect()
}

/// Changes a byte in the middle of the data file of a part.
fn flip(part: &Path) {
    let data = files(part).into_iter().find(|file| file.extension().is_some_and(|end| end == "distcp")).unwrap();
    let mut bytes = fs::read(&data).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(data, bytes).unwrap();
}

#[test]
fn a_host_that_is_lost_loses_nothing_at_any_number_of_ranks() {
    for (lost, ranks) in [(0, 4), (1, 4), (1, 1), (0, 3), (1, 6)] {
        let run = Run::new();
        run.save(4, &[10, 20, 30]);
        fs::remove_dir_all(run.host(lost)).unwrap();
        assert_eq!(run.load(ranks), Some(30), "host {lost} lost, {ranks} ranks");
    }
}

#[test]
fn the_newest_two_steps_stay_and_each_part_has_a_copy_elsewhere() {
    let run = Run::new();
    run.save(4, &[10, 20, 30]);
    // The parts of steps 10, 20, ... on a host.
    let counts = |host: usize, steps: [u64; 3]| {
        let parts: Vec<PathBuf> = run.parts().into_iter().filter(|part| part.starts_with(run.host(host))).collect();
        steps.map(|step| {
            parts.iter().filter(|part| part.to_string_lossy().contains(&format!("step-{step:08}-"))).count()
        })
    };
    for host in [0, 1] {
        assert_eq!(counts(host, [10, 20, 30]), [0, 4, 4]);
        let of_each = |rank: usize| {
            files(&run.host(host)).iter().filter(|file| file.ends_with(format!("__{rank}_0.distcp"))).count()
        };
        assert_eq!([0, 1, 2, 3].map(of_each), [2; 4], "both steps of every rank are on both hosts");
    }
    // The next start of the job, at another number of ranks, goes on in the same way.
    assert_eq!(run.load(2), Some(30));
    run.save(2, &[35, 40]);
    assert_eq!(counts(0, [30, 35, 40]), [0, 4, 4]);
    run.on_ranks(2, |checkpointer, _| checkpointer.clear_memory().unwrap());
    assert_eq!(run.load(2), None);
    assert_eq!(counts(0, [30, 35, 40]), [0; 3]);
}

#[test]
fn a_damaged_part_is_never_used_and_its_copy_is() {
    let run = Run::new();
    run.save(2, &[20, 30]);
    let newest: Vec<PathBuf> =
        run.parts().into_iter().filter(|part| part.to_string_lossy().contains("step-00000030")).collect();
    assert_eq!(newest.len(), 4);
    // One copy of each part.
    flip(newest.iter().find(|part| ends(part, "rank-0-of-2")).unwrap());
    flip(newest.iter().find(|part| ends(part, "rank-1-of-2")).unwrap());
    assert_eq!(run.load(2), Some(30));
    // Both copies of one: the step before it, on all ranks alike.
    newest.iter().filter(|part| ends(part, "rank-1-of-2")).skip(1).for_each(|part| flip(part));
    let strict = run.on_ranks(2, |checkpointer, _| checkpointer.latest_in_memory(true).unwrap_err().to_string());
    assert!(strict[0].contains("step 30") && strict[0].contains("[1]") && strict[0] == strict[1], "{strict:?}");
    assert_eq!(run.load(2), Some(20));
    // The damaged step does not come back.
    assert!(run.parts().iter().all(|part| !part.to_string_lossy().contains("step-00000030")));
}

fn ends(part: &Path, name: &str) -> bool {
    part.to_string_lossy().ends_with(name)
}

#[test]
fn a_step_that_not_all_ranks_have_saved_is_never_taken() {
    let run = Run::new();
    run.save(2, &[20, 30]);
    // The same as if rank 1 had been killed before it saved.
    for part in run.parts().iter().filter(|part| ends(part, "rank-1-of-2") && part.to_string_lossy().contains("00030"))
    {
        fs::remove_dir_all(part).unwrap();
    }
    assert_eq!(run.load(2), Some(20));
}

#[test]
fn the_newer_of_memory_and_checkpoint_is_loaded() {
    let run = Run::new();
    assert_eq!(run.load(2), None);
    let durable = |step: u64| {
        run.on_ranks(2, |checkpointer, group| checkpointer.save(step, &state(group, step)).unwrap());
    };
    run.save(2, &[10]);
    durable(20);
    assert_eq!(run.load(2), Some(20));
    run.save(2, &[30]);
    assert_eq!(run.load(1), Some(30));
    // Without the memory of any host, the checkpoint is what there is.
    fs::remove_dir_all(run.host(0)).unwrap();
    assert_eq!(run.load(2), Some(20));
}

#[test]
fn two_runs_in_one_tier_do_not_meet() {
    let (first, second) = (Run::new(), Run::new());
    let save_to = |run: &Run, step: u64| {
        run_local(2, |group| {
            let memory_tier = Some(first.host(0).into());
            let options = CheckpointerOptions { memory_tier, ..CheckpointerOptions::default() };
            let mut checkpointer = Checkpointer::new(run.0.path().join("run"), &group, options).unwrap();
            let before = checkpointer.latest_in_memory(true).unwrap();
            checkpointer.save_to_memory(step, &state(&group, step)).unwrap();
            (before.map(|found| found.step), checkpointer.latest_in_memory(true).unwrap().map(|found| found.step))
        })
        .unwrap()
    };
    assert_eq!(save_to(&first, 50), [(None, Some(50)); 2]);
    assert_eq!(save_to(&second, 3), [(None, Some(3)); 2]);
    assert_eq!(save_to(&first, 60), [(Some(50), Some(60)); 2]);
    // A run that begins anew in the place of an old one does not find that one's steps.
    fs::remove_dir_all(first.0.path().join("run")).unwrap();
    assert_eq!(save_to(&first, 1), [(None, Some(1)); 2]);
}

#[test]
fn without_a_tier_or_its_space_every_rank_gets_the_same_error_and_nothing_changes() {
    let run = Run::new();
    let none = run_local(2, |group| {
        let mut checkpointer = Checkpointer::new(run.0.path(), &group, CheckpointerOptions::default()).unwrap();
        checkpointer.save_to_memory(1, &state(&group, 1)).unwrap_err()
    });
    assert!(none.unwrap().iter().all(|error| matches!(error, CheckpointError::NoMemoryTier)));
    // A file is where the second host's directory should be.
    fs::write(run.host(1), "x").unwrap();
    let errors = run
        .on_ranks(4, |checkpointer, group| checkpointer.save_to_memory(1, &state(group, 1)).unwrap_err().to_string());
    assert!(errors.iter().all(|error| *error == errors[0] && error.contains("host-1")), "{errors:?}");
    assert_eq!(run.load(2), None);
}
