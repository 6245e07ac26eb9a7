//! The memory tier of a run, on ranks that have a directory for each host: what is lost, damaged or
//! torn, and where a run goes on from then.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, SaveOptions, StepCheckpoint, save,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::TensorBox;
use fsdp_state::StateDict;
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use tempfile::TempDir;

/// The rows of a tensor that is dealt out to ranks.
const ROWS: usize = 7;

/// The state of a step: rows that are spread over the ranks, a tensor that each rank has, and
/// values, one of a single rank.
fn state(group: &ProcessGroup, step: u64) -> StateDict {
    let (rank, ranks) = (group.rank(), group.world_size());
    let (first, end) = (ROWS * rank / ranks, ROWS * (rank + 1) / ranks);
    let elements: Vec<f32> = (first * 3..end * 3)
        .map(|index| index as f32 + 1000. * step as f32)
        .collect();
    let tensor = Tensor::from_vec(elements, (end - first, 3), &Device::Cpu).unwrap();
    let bounds = TensorBox::new(vec![first, 0], vec![end - first, 3]);
    let mut state = StateDict::new();
    state.insert(
        "rows",
        ShardedTensor::new(
            DType::F32,
            vec![ROWS, 3],
            vec![LocalShard { bounds, tensor }],
        )
        .unwrap(),
    );
    state.insert(
        "whole",
        Tensor::full(step as f32, (2, 2), &Device::Cpu).unwrap(),
    );
    state.insert("step", step.cast_signed());
    if rank == ranks - 1 {
        state.insert("of the last rank", "a value");
    }
    state
}

/// Returns the newest step in memory if it is newer than the newest checkpoint.
fn latest_in_memory(
    checkpointer: &mut Checkpointer,
    strict: bool,
) -> Result<Option<StepCheckpoint>, CheckpointError> {
    let latest = checkpointer.latest()?;
    checkpointer.latest_in_memory(latest.as_ref(), strict)
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

    fn on_ranks<T: Send>(
        &self,
        ranks: usize,
        f: impl Fn(&mut Checkpointer, &ProcessGroup) -> T + Sync,
    ) -> Vec<T> {
        let run = |group: ProcessGroup| {
            let memory_tier = Some(self.host(group.rank() / 2).into());
            let options = CheckpointerOptions {
                memory_tier,
                ..CheckpointerOptions::default()
            };
            f(
                &mut Checkpointer::new(self.0.path().join("run"), &group, options).unwrap(),
                &group,
            )
        };
        run_local(ranks, run).unwrap()
    }

    /// Saves steps to memory, as one start of the job.
    fn save(&self, ranks: usize, steps: &[u64]) {
        self.on_ranks(ranks, |checkpointer, group| {
            for &step in steps {
                let report = checkpointer
                    .save_to_memory(step, &state(group, step))
                    .unwrap();
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
            assert_eq!(
                format!("{:?}", elements(&run)),
                format!("{:?}", elements(&expected))
            );
            // It is an ordinary checkpoint, of which every byte has a hash, and which has all
            // values.
            let opened = fsdp_formats::reader::CheckpointReader::open(&path).unwrap();
            let report = verify(&opened, Level::Hashes, VerifyOptions::default()).unwrap();
            assert!(report.problems.is_empty(), "{:?}", report.problems);
            assert_eq!(
                opened.read_value("of the last rank").unwrap().as_str(),
                Some("a value")
            );
            Some(step)
        });
        assert!(loaded.iter().all(|step| *step == loaded[0]), "{loaded:?}");
        loaded[0]
    }

    /// Saves a checkpoint of a step.
    fn checkpoint(&self, step: u64) {
        self.on_ranks(2, |checkpointer, group| {
            checkpointer.save(step, &state(group, step)).unwrap()
        });
    }

    /// Returns the only directory of a run in the tier of a host.
    fn in_tier(&self, host: usize) -> PathBuf {
        let mut found: Vec<PathBuf> = fs::read_dir(self.host(host))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert_eq!(found.len(), 1, "{found:?}");
        found.remove(0)
    }

    /// Returns the parts of a step, on all hosts.
    fn parts_of(&self, step: u64) -> Vec<PathBuf> {
        let name = format!("step-{step:08}-");
        self.parts()
            .into_iter()
            .filter(|part| part.to_string_lossy().contains(&name))
            .collect()
    }

    /// Returns the directories of parts below the directories of all hosts.
    fn parts(&self) -> Vec<PathBuf> {
        let mut parts: Vec<PathBuf> = (0..4).flat_map(|host| files(&self.host(host))).collect();
        parts.retain(|file| file.ends_with(".metadata"));
        // The others are joined checkpoints.
        let is_part = |part: &PathBuf| part.to_string_lossy().contains("-of-");
        parts
            .iter()
            .map(|file| file.parent().unwrap().to_owned())
            .filter(is_part)
            .collect()
    }
}

/// Returns all files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files(&path))
        } else {
            found.push(path)
        }
    }
    found.sort();
    found
}

fn elements(state: &StateDict) -> Vec<(Vec<f32>, Option<i64>)> {
    let rows = &state.get("rows").unwrap().as_sharded().unwrap().shards()[0].tensor;
    let whole = state.get("whole").unwrap().as_tensor().unwrap();
    let step = state.plain_at(&["step"]).and_then(|step| step.as_int());
    [rows, whole]
        .iter()
        .map(|tensor| (tensor.flatten_all().unwrap().to_vec1().unwrap(), step))
        .collect()
}

/// Changes a byte in the middle of the data file of a part.
fn flip(part: &Path) {
    let data = files(part)
        .into_iter()
        .find(|file| file.extension().is_some_and(|end| end == "distcp"))
        .unwrap();
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
        let parts: Vec<PathBuf> = run
            .parts()
            .into_iter()
            .filter(|part| part.starts_with(run.host(host)))
            .collect();
        steps.map(|step| {
            parts
                .iter()
                .filter(|part| part.to_string_lossy().contains(&format!("step-{step:08}-")))
                .count()
        })
    };
    for host in [0, 1] {
        assert_eq!(counts(host, [10, 20, 30]), [0, 4, 4]);
        let of_each = |rank: usize| {
            files(&run.host(host))
                .iter()
                .filter(|file| file.ends_with(format!("__{rank}_0.distcp")))
                .count()
        };
        assert_eq!(
            [0, 1, 2, 3].map(of_each),
            [2; 4],
            "both steps of every rank are on both hosts"
        );
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
    let newest: Vec<PathBuf> = run
        .parts()
        .into_iter()
        .filter(|part| part.to_string_lossy().contains("step-00000030"))
        .collect();
    assert_eq!(newest.len(), 4);
    // One copy of each part.
    flip(
        newest
            .iter()
            .find(|part| ends(part, "rank-0-of-2"))
            .unwrap(),
    );
    flip(
        newest
            .iter()
            .find(|part| ends(part, "rank-1-of-2"))
            .unwrap(),
    );
    assert_eq!(run.load(2), Some(30));
    // Both copies of one: the step before it, on all ranks alike.
    newest
        .iter()
        .filter(|part| ends(part, "rank-1-of-2"))
        .skip(1)
        .for_each(|part| flip(part));
    let strict = run.on_ranks(2, |checkpointer, _| {
        latest_in_memory(checkpointer, true)
            .unwrap_err()
            .to_string()
    });
    assert!(
        strict[0].contains("step 30") && strict[0].contains("[1]") && strict[0] == strict[1],
        "{strict:?}"
    );
    assert_eq!(run.load(2), Some(20));
    // The damaged step does not come back.
    assert!(
        run.parts()
            .iter()
            .all(|part| !part.to_string_lossy().contains("step-00000030"))
    );
}

fn ends(part: &Path, name: &str) -> bool {
    part.to_string_lossy().ends_with(name)
}

#[test]
fn a_step_that_not_all_ranks_have_saved_is_never_taken() {
    let run = Run::new();
    run.save(2, &[20, 30]);
    // The same as if rank 1 had been killed before it saved.
    for part in run
        .parts()
        .iter()
        .filter(|part| ends(part, "rank-1-of-2") && part.to_string_lossy().contains("00030"))
    {
        fs::remove_dir_all(part).unwrap();
    }
    assert_eq!(run.load(2), Some(20));
}

#[test]
fn the_newer_of_memory_and_checkpoint_is_loaded() {
    let run = Run::new();
    assert_eq!(run.load(2), None);
    run.save(2, &[10]);
    run.checkpoint(20);
    assert_eq!(run.load(2), Some(20));
    run.save(2, &[30]);
    assert_eq!(run.load(1), Some(30));
    // Without the memory of any host, the checkpoint is what there is.
    fs::remove_dir_all(run.host(0)).unwrap();
    assert_eq!(run.load(2), Some(20));
}

#[test]
fn steps_in_memory_are_not_used_once_the_run_has_saved_without_its_tier() {
    let go_on_without = |run: &Run, loaded: Option<u64>, steps: &[u64]| {
        run_local(2, |group| {
            let options = CheckpointerOptions::default();
            let mut checkpointer =
                Checkpointer::new(run.0.path().join("run"), &group, options).unwrap();
            if let Some(loaded) = loaded {
                checkpointer.load(loaded, &mut state(&group, 0)).unwrap();
            }
            for &step in steps {
                checkpointer.save(step, &state(&group, step)).unwrap();
            }
        })
        .unwrap();
    };
    // It goes on from a checkpoint.
    let run = Run::new();
    run.checkpoint(50);
    run.save(2, &[60]);
    assert_eq!(run.load(2), Some(60));
    go_on_without(&run, Some(50), &[52, 53]);
    go_on_without(&run, Some(53), &[54]);
    assert_eq!(run.load(2), Some(54));
    run.save(2, &[56]);
    assert_eq!(run.load(2), Some(56));
    // The directory with the steps that it has left is gone from the host.
    assert!(run.in_tier(0).exists());
    assert!(run.parts_of(60).is_empty());
    // A save that fails has not gone on from elsewhere.
    let run = Run::new();
    run.checkpoint(50);
    run.save(2, &[60]);
    run_local(2, |group| {
        let options = CheckpointerOptions::default();
        let run = run.0.path().join("run");
        let mut checkpointer = Checkpointer::new(run, &group, options).unwrap();
        checkpointer.load(50u64, &mut state(&group, 0)).unwrap();
        // Such a checkpoint exists already.
        checkpointer.save(50, &state(&group, 50)).unwrap_err();
    })
    .unwrap();
    assert_eq!(run.load(2), Some(60));
    // It begins anew.
    let run = Run::new();
    run.save(4, &[60]);
    go_on_without(&run, None, &[5]);
    assert_eq!(run.load(4), Some(5));
}

#[test]
fn two_runs_in_one_tier_do_not_meet() {
    let (first, second) = (Run::new(), Run::new());
    let save_to = |run: &Run, step: u64| {
        run_local(2, |group| {
            let memory_tier = Some(first.host(0).into());
            let options = CheckpointerOptions {
                memory_tier,
                ..CheckpointerOptions::default()
            };
            let mut checkpointer =
                Checkpointer::new(run.0.path().join("run"), &group, options).unwrap();
            let before = latest_in_memory(&mut checkpointer, true).unwrap();
            checkpointer
                .save_to_memory(step, &state(&group, step))
                .unwrap();
            (
                before.map(|found| found.step),
                latest_in_memory(&mut checkpointer, true)
                    .unwrap()
                    .map(|found| found.step),
            )
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
        let mut checkpointer =
            Checkpointer::new(run.0.path(), &group, CheckpointerOptions::default()).unwrap();
        checkpointer
            .save_to_memory(1, &state(&group, 1))
            .unwrap_err()
    });
    assert!(
        none.unwrap()
            .iter()
            .all(|error| matches!(error, CheckpointError::NoMemoryTier))
    );
    // A file is where the second host's directory should be.
    fs::write(run.host(1), "x").unwrap();
    let errors = run.on_ranks(4, |checkpointer, group| {
        checkpointer
            .save_to_memory(1, &state(group, 1))
            .unwrap_err()
            .to_string()
    });
    assert!(
        errors
            .iter()
            .all(|error| *error == errors[0] && error.contains("host-1")),
        "{errors:?}"
    );
    assert_eq!(run.load(2), None);
}

#[test]
fn a_run_that_goes_back_continues_from_what_it_did_then() {
    let run = Run::new();
    run.checkpoint(5);
    run.on_ranks(2, |checkpointer, group| {
        for step in [10, 20, 30] {
            checkpointer
                .save_to_memory(step, &state(group, step))
                .unwrap();
        }
        checkpointer.load(5u64, &mut state(group, 0)).unwrap();
        for step in [12, 14] {
            checkpointer
                .save_to_memory(step, &state(group, step))
                .unwrap();
        }
    });
    assert_eq!(run.load(2), Some(14));
}

#[test]
fn a_host_that_comes_back_with_an_abandoned_step_is_not_believed() {
    let run = Run::new();
    run.checkpoint(5);
    run.save(4, &[30]);
    let away = run.0.path().join("away");
    fs::rename(run.host(1), &away).unwrap();
    fs::remove_dir_all(run.host(0)).unwrap();
    assert_eq!(run.load(2), Some(5));
    run.save(2, &[12, 14]);
    fs::rename(away, run.host(1)).unwrap();
    assert_eq!(run.load(4), Some(14));
}

#[test]
fn a_step_that_is_in_use_and_cannot_be_removed_does_not_come_back() {
    let run = Run::new();
    run.checkpoint(5);
    run.save(2, &[20, 30]);
    let readers: Vec<_> = run
        .parts_of(30)
        .iter()
        .map(|part| fsdp_formats::reader::CheckpointReader::open(part.as_path()).unwrap())
        .collect();
    run.on_ranks(2, |checkpointer, group| {
        checkpointer.load(5u64, &mut state(group, 0)).unwrap();
        checkpointer.save_to_memory(12, &state(group, 12)).unwrap();
    });
    assert_eq!((run.parts_of(30).len(), readers.len()), (4, 4));
    assert_eq!(run.load(2), Some(12));
}

#[test]
fn a_step_can_be_saved_again() {
    let run = Run::new();
    run.save(2, &[20, 30, 30]);
    assert_eq!((run.parts_of(20).len(), run.parts_of(30).len()), (4, 4));
    assert_eq!(run.load(2), Some(30));
}

#[test]
fn a_step_without_its_copies_replaces_none_that_has_them() {
    let run = Run::new();
    run.save(2, &[20, 30]);
    // The same as if the copies of step 30 had not fitted.
    for part in run.parts_of(30) {
        let own = part
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .split('-')
            .nth(4)
            .unwrap()
            .to_owned();
        if !part.parent().unwrap().ends_with(format!("rank-{own}")) {
            fs::remove_dir_all(part).unwrap();
        }
    }
    assert_eq!(run.parts_of(30).len(), 2);
    run.save(2, &[40]);
    assert_eq!([20, 30, 40].map(|step| run.parts_of(step).len()), [4, 0, 4]);
}

#[test]
fn a_copied_run_has_a_tier_of_its_own() {
    let run = Run::new();
    run.save(2, &[30]);
    let (first, copy) = (run.0.path().join("run"), run.0.path().join("copy"));
    fs::create_dir(&copy).unwrap();
    for file in files(&first) {
        fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
    }
    run_local(2, |group| {
        let memory_tier = Some(run.host(0).into());
        let options = CheckpointerOptions {
            memory_tier,
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(copy.clone(), &group, options).unwrap();
        assert_eq!(latest_in_memory(&mut checkpointer, true).unwrap(), None);
        checkpointer.save_to_memory(7, &state(&group, 7)).unwrap();
    })
    .unwrap();
    assert_eq!(run.load(2), Some(30));
}

#[test]
fn ranks_that_differ_in_a_value_get_the_same_error_and_nothing_changes() {
    let run = Run::new();
    run.save(2, &[20]);
    let before = run.parts();
    let errors = run.on_ranks(2, |checkpointer, group| {
        let mut state = state(group, 30);
        state.insert("rng", group.rank() as i64);
        checkpointer
            .save_to_memory(30, &state)
            .unwrap_err()
            .to_string()
    });
    assert!(
        errors[0].contains("`rng`") && errors[0] == errors[1],
        "{errors:?}"
    );
    assert_eq!(run.parts(), before);
    // Elements that no rank holds are found when they are saved, not when they are needed.
    let errors = run.on_ranks(2, |checkpointer, group| {
        let mut state = state(group, 30);
        if group.rank() == 1 {
            state.remove("rows");
        }
        checkpointer
            .save_to_memory(30, &state)
            .unwrap_err()
            .to_string()
    });
    assert!(
        errors[0].contains("`rows`") && errors[0] == errors[1],
        "{errors:?}"
    );
    assert_eq!(run.parts(), before);
}

#[test]
fn a_tier_that_cannot_be_used_leaves_the_checkpoints() {
    let run = Run::new();
    run.checkpoint(5);
    run.save(2, &[30]);
    // The second host cannot join the parts that it receives.
    let name = run.in_tier(0).file_name().unwrap().to_owned();
    let second = run.host(1).join(name);
    fs::create_dir_all(&second).unwrap();
    fs::write(second.join("step-00000030"), "x").unwrap();
    let errors = run.on_ranks(4, |checkpointer, _| {
        latest_in_memory(checkpointer, false)
            .unwrap_err()
            .to_string()
    });
    assert!(
        errors
            .iter()
            .all(|error| *error == errors[0] && error.contains("host-1")),
        "{errors:?}"
    );
    assert!(
        run.parts()
            .iter()
            .all(|part| !part.starts_with(run.host(1))),
        "what was received would fill the tier"
    );
    assert_eq!(run.load(4), Some(5));
    // Without that file it can.
    fs::remove_file(second.join("step-00000030")).unwrap();
    assert_eq!(run.load(4), Some(30));
}

#[cfg(unix)]
#[test]
fn a_part_that_cannot_be_read_is_not_taken_for_damaged() {
    let run = Run::new();
    run.checkpoint(5);
    run.save(2, &[20, 30]);
    // A socket: the system cannot open it.
    let mut data: Vec<PathBuf> = run
        .parts_of(30)
        .iter()
        .flat_map(|part| files(part))
        .collect();
    data.retain(|file| file.extension().is_some_and(|end| end == "distcp"));
    for file in &data {
        fs::rename(file, file.with_extension("away")).unwrap();
        let socket = run.0.path().join("socket");
        std::os::unix::net::UnixListener::bind(&socket).unwrap();
        fs::rename(socket, file).unwrap();
    }
    let errors = run.on_ranks(2, |checkpointer, _| {
        latest_in_memory(checkpointer, false)
            .unwrap_err()
            .to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert_eq!(run.load(2), Some(5));
    assert_eq!(run.parts_of(30).len(), 4);
    for file in &data {
        fs::rename(file.with_extension("away"), file).unwrap();
    }
    assert_eq!(run.load(2), Some(30));
}

#[test]
fn any_host_may_be_lost_also_one_with_most_of_the_ranks() {
    for (lost, ranks) in [(0, 3), (1, 3)] {
        let run = Run::new();
        run.save(ranks, &[10, 20]);
        fs::remove_dir_all(run.host(lost)).unwrap();
        assert_eq!(run.load(ranks), Some(20), "host {lost}");
    }
}

#[test]
fn a_tier_that_is_removed_meanwhile_is_made_again() {
    let run = Run::new();
    run.on_ranks(1, |checkpointer, group| {
        checkpointer.save_to_memory(10, &state(group, 10)).unwrap();
        fs::remove_dir_all(run.host(0)).unwrap();
        checkpointer.save_to_memory(20, &state(group, 20)).unwrap();
    });
    assert_eq!(run.load(1), Some(20));
    run.on_ranks(1, |checkpointer, _| {
        latest_in_memory(checkpointer, false).unwrap();
        fs::remove_dir_all(run.host(0)).unwrap();
        checkpointer.clear_memory().unwrap();
    });
}

#[test]
fn a_checkpoint_after_a_resume_from_memory_continues_the_chain() {
    let run = Run::new();
    run.checkpoint(5);
    run.save(2, &[10]);
    run.on_ranks(2, |checkpointer, group| {
        checkpointer.load_latest(&mut state(group, 0)).unwrap();
        checkpointer.save(15u64, &state(group, 15)).unwrap();
    });
    let open = |step: u64| {
        fsdp_formats::checkpoint::open(
            run.0.path().join(format!("run/step-{step:08}")),
            OpenOptions { verify: true },
        )
        .unwrap()
    };
    let parent = open(15).lineage().unwrap().parent.unwrap();
    assert_eq!(
        (parent.step, parent.digest),
        (5, open(5).digests().unwrap().root())
    );
}

#[test]
fn a_run_below_the_directory_of_its_tier_continues_from_its_own_checkpoints() {
    let dir = TempDir::new().unwrap();
    run_local(2, |group| {
        let options = CheckpointerOptions {
            memory_tier: Some(dir.path().into()),
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path().join("run"), &group, options).unwrap();
        for step in [5, 10] {
            checkpointer.save(step, &state(&group, step)).unwrap();
        }
        checkpointer.load_latest(&mut state(&group, 0)).unwrap();
        checkpointer.save(15, &state(&group, 15)).unwrap();
        let path = dir.path().join("run/step-00000015");
        let saved = fsdp_formats::checkpoint::open(path, OpenOptions { verify: true }).unwrap();
        assert_eq!(
            saved.lineage().unwrap().parent.map(|parent| parent.step),
            Some(10)
        );
    })
    .unwrap();
}

#[test]
fn a_checkpoint_of_another_run_in_the_tiers_directory_is_no_step_of_this_one() {
    let dir = TempDir::new().unwrap();
    run_local(2, |group| {
        let options = CheckpointerOptions {
            memory_tier: Some(dir.path().join("tier").into()),
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path().join("run"), &group, options).unwrap();
        checkpointer.save(5, &state(&group, 5)).unwrap();
        checkpointer.save_to_memory(6, &state(&group, 6)).unwrap();
        // Staged there because it is fast.
        let staged = dir.path().join("tier/pretrained/step-00000500");
        save(
            &*staged,
            &state(&group, 500),
            &group,
            &SaveOptions::default(),
        )
        .unwrap();
        checkpointer.load(&*staged, &mut state(&group, 0)).unwrap();
        checkpointer.save(10, &state(&group, 10)).unwrap();
        let path = dir.path().join("run/step-00000010");
        let saved = fsdp_formats::checkpoint::open(path, OpenOptions { verify: true }).unwrap();
        let parent = saved.lineage().unwrap().parent;
        assert_ne!(parent.map(|parent| parent.step), Some(5));
    })
    .unwrap();
}

#[test]
fn parts_of_different_steps_are_never_joined() {
    let run = Run::new();
    run.save(2, &[10]);
    let before = run.parts();
    let errors = run.on_ranks(2, |checkpointer, group| {
        let mut state = state(group, 0);
        // Nothing in the state tells its step.
        state.remove("step");
        checkpointer
            .save_to_memory(20 + 10 * group.rank() as u64, &state)
            .unwrap_err()
            .to_string()
    });
    assert!(
        errors
            .iter()
            .all(|error| error.contains("step 20") && error.contains("step 30")),
        "{errors:?}"
    );
    assert_eq!(run.parts(), before);
    assert_eq!(run.load(2), Some(10));
}

#[cfg(unix)]
#[test]
fn the_tier_of_a_run_is_its_owners_alone_and_disappears_with_it() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    let run = Run::new();
    run.save(2, &[10]);
    let directory = run.in_tier(0);
    assert_eq!(
        fs::metadata(&directory).unwrap().permissions().mode() & 0o777,
        0o700
    );
    run.on_ranks(2, |checkpointer, group| {
        checkpointer.clear_memory().unwrap();
        // All ranks have cleared it.
        group.barrier().unwrap();
        assert_eq!(fs::read_dir(run.host(0)).unwrap().count(), 0);
        group.barrier().unwrap();
        // It can be used again.
        checkpointer.save_to_memory(20, &state(group, 20)).unwrap();
    });
    // Only root can give a directory to another user.
    if fs::metadata(&directory).unwrap().uid() == 0
        && std::os::unix::fs::chown(&directory, Some(1234), None).is_ok()
    {
        let errors = run.on_ranks(2, |checkpointer, _| {
            latest_in_memory(checkpointer, false)
                .unwrap_err()
                .to_string()
        });
        assert!(
            errors[0].contains("another user") && errors[0] == errors[1],
            "{errors:?}"
        );
    }
}
