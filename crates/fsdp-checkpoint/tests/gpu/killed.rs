//! A rank that is killed while state on GPUs is saved in the background.

use std::path::PathBuf;
use std::time::Duration;

use fsdp_checkpoint::{Checkpointer, CheckpointerOptions};
use fsdp_comm::{BackendKind, init_process_group_within};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};

use crate::faults::readable_steps;
use crate::processes::Ranks;
use crate::{alone, backward, large_run, on_gpu, step};

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable that names the directory of the run.
const RUN: &str = "FSDP_TEST_RUN";

/// Saves a run in the background. As the task `killed`, rank 1 dies in its second save; as `next`,
/// the run goes on from the first one.
pub(crate) fn run_rank() {
    let is_killed = std::env::var("FSDP_TEST").unwrap() == "killed";
    let dir = PathBuf::from(std::env::var_os(RUN).unwrap());
    let group = init_process_group_within(BackendKind::Tcp, DEADLINE).unwrap();
    let adamw = Algorithm::AdamW(AdamOptions::adamw());
    let mut checkpointer = Checkpointer::new(&dir, &group, CheckpointerOptions::default()).unwrap();
    let mut run = large_run(group.clone(), on_gpu(), &adamw, false);
    if !is_killed {
        checkpointer.load(1, &mut run).unwrap();
    }
    backward(&run, 1);
    step(&mut run);
    let first_step = if is_killed { 1 } else { 2 };
    checkpointer.save_async(first_step, &run).unwrap();
    checkpointer.wait().unwrap();
    if !is_killed {
        return;
    }
    backward(&run, 2);
    checkpointer.save_async(2, &run).unwrap();
    if group.rank() == 1 {
        std::process::abort();
    }
    let error = checkpointer.wait().unwrap_err().to_string();
    assert!(error.contains("rank 1"), "{error}");
}

#[test]
fn a_rank_that_dies_in_a_save_is_named_and_the_earlier_checkpoint_stays() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let variables = [(RUN, dir.path().to_str().unwrap())];
    let mut ranks = Ranks::start(2, "killed", |_| variables.to_vec());
    ranks.wait_for(&[0], 2 * DEADLINE);
    assert_eq!(readable_steps(dir.path()), [1]);
    Ranks::start(2, "next", |_| variables.to_vec()).assert_casualties(&[]);
    assert_eq!(readable_steps(dir.path()), [1, 2]);
}
