//! The limit on the open files of this process. Every connection to another rank takes one.

/// The fewest files that a rank needs beside its connections.
#[cfg(any(target_os = "linux", test))]
const MIN_OTHER_FILES: u64 = 16;

/// The files beside the connections that a process gets where the system's limit allows it: those
/// of handshakes that are not complete yet, and those of the program.
#[cfg(any(target_os = "linux", test))]
const OTHER_FILES: u64 = 600;

/// Raises the limit on open files of this process if `connections` connections need it.
///
/// # Errors
/// The system does not allow so many: a message that says what to do.
#[cfg(target_os = "linux")]
pub(crate) fn raise_open_file_limit(connections: usize) -> Result<(), String> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let Some(raised) = raised_limit(current, maximum, connections)? else {
        return Ok(());
    };
    // A limit that cannot be raised is noticed again when a file cannot be opened.
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(raised),
            maximum,
        },
    )
    .ok();
    Ok(())
}

/// Returns at once: on systems other than Linux no limit is raised.
#[cfg(not(target_os = "linux"))]
pub(crate) fn raise_open_file_limit(_connections: usize) -> Result<(), String> {
    Ok(())
}

/// Returns the new limit if the `current` one must be raised for `connections` connections, and
/// `None` if it need not be. A limit that is `None` is no limit. The error is a message that the
/// system does not allow so many.
#[cfg(any(target_os = "linux", test))]
fn raised_limit(
    current: Option<u64>,
    maximum: Option<u64>,
    connections: usize,
) -> Result<Option<u64>, String> {
    let [needed_limit, wanted_limit] = [MIN_OTHER_FILES, OTHER_FILES]
        .map(|other_files| (connections as u64).saturating_add(other_files));
    let Some(current) = current.filter(|&current| current < wanted_limit) else {
        return Ok(None);
    };
    let possible_limit = maximum
        .map_or(wanted_limit, |maximum| maximum.min(wanted_limit))
        .max(current);
    if possible_limit < needed_limit {
        return Err(format!(
            "{connections} connections to other ranks need {needed_limit} open files, but this process may have {possible_limit}: \
             raise the limit (`ulimit -n`)"
        ));
    }
    Ok((possible_limit > current).then_some(possible_limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_for_many_connections_and_never_lowered() {
        // Few ranks need nothing.
        assert_eq!(raised_limit(Some(1024), Some(4096), 16), Ok(None));
        assert_eq!(raised_limit(None, None, 1 << 16), Ok(None));
        assert_eq!(
            raised_limit(Some(1024), Some(1 << 20), 1000),
            Ok(Some(1600))
        );
        assert_eq!(raised_limit(Some(1024), None, 1000), Ok(Some(1600)));
        assert_eq!(raised_limit(Some(1024), Some(1200), 1000), Ok(Some(1200)));
        assert_eq!(raised_limit(Some(1200), Some(1200), 1000), Ok(None));
    }

    #[test]
    fn connections_that_the_system_does_not_allow_are_an_error_that_says_what_to_do() {
        let message = raised_limit(Some(256), Some(1024), 2048).unwrap_err();
        assert!(
            message.contains("2048 connections") && message.contains("1024"),
            "{message}"
        );
        assert!(message.contains("ulimit -n"), "{message}");
        assert!(raised_limit(Some(1024), Some(1024), usize::MAX).is_err());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_room_for_the_ranks_of_a_large_job() {
        use rustix::process::{Resource, getrlimit};
        raise_open_file_limit(600).unwrap();
        assert!(
            getrlimit(Resource::Nofile)
                .current
                .is_none_or(|current| current >= 600 + MIN_OTHER_FILES)
        );
    }
}
