//! The effective time of a disturbed run: the part of it that went into steps which count.

use std::time::Duration;

/// Returns the effective time of a run: the time of its useful steps, divided by the whole time
/// that it took.
///
/// `steps` are the seconds that each of its steps takes in a run that nobody disturbs, without
/// saves. So a step counts once, however often it was done, and everything else counts as lost:
/// starts, saves, loads, the time until a failure is noticed, and steps that were done again.
/// Returns `None` if there is no step or no time.
pub(super) fn effective_share(steps: &[f64], whole: Duration) -> Option<f64> {
    let share = steps.iter().sum::<f64>() / whole.as_secs_f64();
    (!steps.is_empty() && share.is_finite()).then_some(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_time_is_the_time_of_undisturbed_steps_over_the_whole_time() {
        assert_eq!(
            effective_share(&[0.5; 90], Duration::from_secs(60)),
            Some(0.75)
        );
        assert_eq!(
            effective_share(&[0.25, 0.75], Duration::from_secs(4)),
            Some(0.25)
        );
    }

    #[test]
    fn a_run_without_steps_or_without_time_has_no_effective_time() {
        assert_eq!(effective_share(&[], Duration::from_secs(60)), None);
        assert_eq!(effective_share(&[0.5], Duration::ZERO), None);
    }
}
