//! A type of one's own that is loaded through a checkpointer: what fails on one rank is every
//! rank's error, as it is in a save, and the run can go on.

use candle_core::{Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, LoadReport, Stateful,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_state::StateDict;

/// When a load fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fails {
    Never,
    BeforeLoading,
    AfterLoading,
}

struct Own {
    state: StateDict,
    fails: Fails,
}

fn failure() -> CheckpointError {
    CheckpointError::Unsavable {
        fqn: "tokenizer".to_owned(),
        problem: "its file is not on this host".to_owned(),
    }
}

impl Stateful for Own {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        Ok(self.state.clone())
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        if self.fails == Fails::BeforeLoading {
            return Err(failure());
        }
        let report = self.state.load_state_dict(checkpoint, group, options)?;
        match self.fails {
            Fails::AfterLoading => Err(failure()),
            _ => Ok(report),
        }
    }
}

fn own(fails: Fails) -> Own {
    let mut state = StateDict::new();
    state.insert("weight", Tensor::full(1f32, 10, &Device::Cpu).unwrap());
    Own { state, fails }
}

#[test]
fn a_load_that_fails_on_some_ranks_is_the_same_error_on_all_and_the_run_goes_on() {
    for fails in [Fails::BeforeLoading, Fails::AfterLoading] {
        for failing in [vec![1], vec![0, 2], vec![0, 1, 2]] {
            let dir = tempfile::tempdir().unwrap();
            let messages = run_local(3, |group| {
                let options = CheckpointerOptions::default();
                let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
                checkpointer.save(1, &own(Fails::Never)).unwrap();
                let fails_here = failing.contains(&group.rank());
                let mut run = own(if fails_here { fails } else { Fails::Never });
                let error = checkpointer.load(1, &mut run).unwrap_err();
                // The group and the checkpointer are as good as before.
                run.fails = Fails::Never;
                assert!(checkpointer.load(1, &mut run).unwrap().is_clean());
                checkpointer.save(2, &run).unwrap();
                error.to_string()
            })
            .unwrap();
            for message in &messages {
                assert!(
                    message.contains("tokenizer") && message.contains("not on this host"),
                    "{fails:?} on {failing:?}: {message}"
                );
                assert_eq!(message, &messages[0], "{fails:?} on {failing:?}");
            }
            let names_rank = messages[0].contains("rank");
            assert_eq!(names_rank, failing.len() < 3, "{}", messages[0]);
        }
    }
}

/// A checkpoint that does not fit is the same error as from a load without a checkpointer.
#[test]
fn a_checkpoint_that_does_not_fit_keeps_its_own_error() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let options = CheckpointerOptions::default();
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        checkpointer.save(1, &own(Fails::Never)).unwrap();
        let mut run = own(Fails::Never);
        run.state
            .insert("other", Tensor::full(1f32, 10, &Device::Cpu).unwrap());
        let path = checkpointer.location(1);
        let alone = fsdp_checkpoint::load(
            path,
            &mut run.state.clone(),
            &group,
            &LoadOptions::default(),
        )
        .unwrap_err();
        let error = checkpointer.load(1, &mut run).unwrap_err();
        assert_eq!(error.to_string(), alone.to_string());
        assert_eq!(
            std::mem::discriminant(&error),
            std::mem::discriminant(&alone)
        );
        assert!(error.to_string().contains("`other`"), "{error}");
    })
    .unwrap();
}
