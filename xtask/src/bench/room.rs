//! The room that a bench takes in memory and in the directories that it writes to. It is checked
//! before anything is measured, and given back after it, also by the next run if this one is
//! killed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{statfs, statvfs};

use crate::files::{field, remove_directory};
use crate::shell::say;

/// The beginning of the names of the directories of runs. The id of the process follows.
const PREFIX: &str = "xtask-bench-";
/// The type of a file system in memory, as Linux tells it.
const TMPFS: u64 = 0x0102_1994;
/// The memory that a program takes whatever the size of the state.
const PROGRAM_BYTES: u64 = 512 << 20;

/// The room that one program of a group takes, as multiples of the size of the state. Each number
/// of ranks has a program of its own, so that what one has kept does not add to the next.
struct Need {
    group: &'static str,
    /// Memory: the state, its gradients, and what is measured beside it.
    memory: f64,
    /// Files that are there at one time.
    files: f64,
}

/// The groups whose room depends on the size of the state.
const NEEDS: [Need; 7] = [
    Need {
        group: "save",
        memory: 1.5,
        files: 1.0,
    },
    Need {
        group: "load",
        memory: 3.5,
        files: 2.0,
    },
    Need {
        group: "full",
        memory: 4.5,
        files: 0.0,
    },
    Need {
        group: "background",
        memory: 3.5,
        files: 2.0,
    },
    Need {
        group: "conversions",
        memory: 2.5,
        files: 3.0,
    },
    Need {
        group: "plugin",
        memory: 3.5,
        files: 2.0,
    },
    Need {
        group: "mergers",
        memory: 2.5,
        files: 3.0,
    },
];

/// A directory of this run.
struct Place {
    name: String,
    directory: PathBuf,
}

/// The directories of this run, which are removed at its end.
pub(super) struct Room {
    places: Vec<Place>,
}

impl Room {
    /// Makes a directory of this run in each place, which is given as NAME=DIRECTORY. Removes those
    /// of runs that have been killed.
    ///
    /// # Errors
    /// A place that is given in another way, or cannot be written to.
    pub(super) fn new(places: &[String]) -> Result<Self> {
        let mut room = Room { places: Vec::new() };
        for place in places {
            let (name, parent) = place
                .split_once('=')
                .with_context(|| format!("`{place}` is not NAME=DIRECTORY"))?;
            let parent = Path::new(parent);
            remove_leftovers(parent)?;
            let directory = parent.join(format!("{PREFIX}{}", std::process::id()));
            create_directory(&directory)?;
            room.places.push(Place {
                name: name.to_owned(),
                directory,
            });
        }
        Ok(room)
    }

    /// Returns the directories as programs take them.
    pub(super) fn places(&self) -> String {
        let places: Vec<String> = self.places.iter().map(Place::argument).collect();
        places.join(",")
    }

    /// Returns the first directory as programs take it.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn first(&self) -> Result<(String, &Path)> {
        let place = self.places.first().context("there is no `--place`")?;
        Ok((place.argument(), &place.directory))
    }

    /// Checks that what the programs of a group take fits, with a state of this size.
    ///
    /// # Errors
    /// It does not fit into memory, or into a file system.
    pub(super) fn check(&self, group: &str, size: &str) -> Result<()> {
        let Some(need) = NEEDS.iter().find(|need| need.group == group) else {
            return Ok(());
        };
        let state_bytes = parse_size(size)? as f64;
        let file_bytes = (need.files * state_bytes) as u64;
        let mut memory_bytes = PROGRAM_BYTES + (need.memory * state_bytes) as u64;
        for place in self.places.iter().filter(|_| file_bytes > 0) {
            let directory = &place.directory;
            let free_bytes = free_bytes(directory)?;
            ensure!(
                file_bytes <= free_bytes,
                "`{group}` with {size} of state needs about {} in `{}`, where {} are free: choose a smaller `--size` or \
                 another `--place`",
                gib_text(file_bytes),
                directory.display(),
                gib_text(free_bytes)
            );
            // Places are written to one after the other, so the largest counts.
            if is_in_memory(directory)? {
                let with_files = PROGRAM_BYTES + ((need.memory + need.files) * state_bytes) as u64;
                memory_bytes = memory_bytes.max(with_files);
            }
        }
        let available_bytes = available_memory();
        ensure!(
            memory_bytes <= available_bytes,
            "`{group}` with {size} of state needs about {} of memory, with files in memory, and {} are available: choose a \
             smaller `--size`, or a `--place` on a disk",
            gib_text(memory_bytes),
            gib_text(available_bytes)
        );
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        for place in &self.places {
            if let Err(error) = remove_directory(&place.directory) {
                say(&format!("xtask: {error:#}"));
            }
        }
    }
}

impl Place {
    /// Returns NAME=DIRECTORY.
    fn argument(&self) -> String {
        format!("{}={}", self.name, self.directory.display())
    }
}

fn create_directory(path: &Path) -> Result<()> {
    fs::create_dir(path).with_context(|| format!("failed to create `{}`", path.display()))
}

/// Removes the directories of runs that have been killed: their processes are no more.
///
/// # Errors
/// The place cannot be listed, or a directory not be removed.
fn remove_leftovers(parent: &Path) -> Result<()> {
    let entries =
        fs::read_dir(parent).with_context(|| format!("failed to list `{}`", parent.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let process = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|process| process.parse::<u32>().ok());
        let is_leftover = process.is_some_and(|process| !is_running(process));
        if is_leftover {
            let path = entry.path();
            say(&format!(
                "xtask: removing `{}`, which a run that was killed has left",
                path.display()
            ));
            remove_directory(&path)?;
        }
    }
    Ok(())
}

/// Returns `true` if there is another process with this id.
fn is_running(process: u32) -> bool {
    // This one has made no directory yet.
    process != std::process::id() && Path::new(&format!("/proc/{process}")).exists()
}

/// Returns `true` if the files of a directory lie in memory.
fn is_in_memory(directory: &Path) -> Result<bool> {
    let status = statfs(directory)
        .with_context(|| format!("failed to inspect `{}`", directory.display()))?;
    Ok(status.f_type as u64 == TMPFS)
}

/// Returns the bytes that may still be written to a directory's file system.
fn free_bytes(directory: &Path) -> Result<u64> {
    let status = statvfs(directory)
        .with_context(|| format!("failed to inspect `{}`", directory.display()))?;
    Ok(status.f_bavail.saturating_mul(status.f_frsize))
}

/// Returns the memory that programs may still take: of the machine, and of the group that this
/// process is limited by. The largest number if it cannot be told.
fn available_memory() -> u64 {
    let machine = field("/proc/meminfo", "MemAvailable");
    let machine = machine.trim_end_matches(" kB").parse::<u64>();
    let machine = machine.map_or(u64::MAX, |kib| kib << 10);
    let limited = control_group_bytes("memory.max").zip(control_group_bytes("memory.current"));
    let limited = limited.map_or(u64::MAX, |(most, current)| most.saturating_sub(current));
    machine.min(limited)
}

/// Returns a number that Linux tells about the control group of this process; `None` if there is
/// none.
fn control_group_bytes(file: &str) -> Option<u64> {
    let text = fs::read_to_string(Path::new("/sys/fs/cgroup").join(file)).ok()?;
    text.trim().parse().ok()
}

/// Parses a size of the state, such as `256m`.
fn parse_size(text: &str) -> Result<u64> {
    let (number, unit) = text.split_at(text.len().saturating_sub(1));
    let factor: u64 = match unit {
        "m" => 1 << 20,
        "g" => 1 << 30,
        _ => 0,
    };
    let number: u64 = number.parse().unwrap_or(0);
    let bytes = number.saturating_mul(factor);
    ensure!(bytes > 0, "`{text}` is not a size such as 256m or 2g");
    Ok(bytes)
}

fn gib_text(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory of the machine on which the book's figures were taken.
    const MACHINE_BYTES: f64 = (24u64 << 30) as f64;

    fn place(directory: &Path) -> String {
        format!("here={}", directory.display())
    }

    #[test]
    fn every_group_takes_at_most_half_of_the_books_machine() {
        for need in &NEEDS {
            let state = parse_size("2g").unwrap() as f64;
            let bytes = PROGRAM_BYTES as f64 + (need.memory + need.files) * state;
            assert!(bytes <= MACHINE_BYTES / 2.0, "{}", need.group);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_before_it_starts() {
        let parent = tempfile::tempdir().unwrap();
        let room = Room::new(&[place(parent.path())]).unwrap();
        room.check("save", "16m").unwrap();
        room.check("planning", "16m").unwrap();
        for group in ["save", "full"] {
            let text = room.check(group, "900000g").unwrap_err().to_string();
            assert!(text.contains(group) && text.contains("--size"), "{text}");
        }
        assert!(room.check("save", "much").is_err());
    }

    #[test]
    fn a_run_leaves_nothing_and_removes_what_a_killed_one_has_left() {
        let parent = tempfile::tempdir().unwrap();
        // No process has this id: it is above the largest that Linux gives.
        let left = parent.path().join(format!("{PREFIX}4194305"));
        let running = parent.path().join(format!("{PREFIX}1"));
        let foreign = parent.path().join(format!("{PREFIX}notes"));
        for directory in [&left, &running, &foreign] {
            create_directory(directory).unwrap();
            create_directory(&directory.join("2g")).unwrap();
        }
        let room = Room::new(&[place(parent.path())]).unwrap();
        assert!(!left.exists() && running.exists() && foreign.exists());
        let (argument, directory) = room.first().unwrap();
        assert_eq!(argument, place(directory));
        let directory = directory.to_owned();
        create_directory(&directory.join("2g")).unwrap();
        drop(room);
        assert!(!directory.exists() && running.exists() && foreign.exists());
    }
}
