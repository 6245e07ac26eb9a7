//! The place of a checkpoint in its run: its parent, and what has changed since then.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;

use fsdp_digest::Digest;
use fsdp_layout::{ErrorKind, Failure as _, with_causes};
use tracing::warn;

use crate::dcp::reader::CheckpointReader;
use crate::error::FileError;
use crate::formats::checkpoint::Checkpoint;
use crate::formats::read::OpenOptions;
use crate::metadata::METADATA_FILE;
use crate::open::{check_has_metadata, has_lost_metadata, open};
use crate::steps::list_steps;
use crate::storage::checked_directory::CheckedDirectory;
pub use crate::storage::lineage::{Branch, BranchPoint, DataPosition, Lineage, Parent};
use crate::storage::location::Location;

/// Finds the branches of a run's checkpoints; `None` for one that does not exist any more. Only
/// integrity files are read.
///
/// A checkpoint without a lineage is on the first branch: it was saved by a program that knows no
/// branches. One whose integrity file is damaged, or was lost with its metadata, counts as one of
/// the newest branch, so that whoever continues from it finds the damage.
///
/// # Errors
/// A directory or an integrity file that cannot be read.
pub fn read_branches(checkpoints: &[&Location]) -> Result<Vec<Option<Branch>>, FileError> {
    let mut branches = Vec::with_capacity(checkpoints.len());
    let mut damaged = Vec::new();
    for checkpoint in checkpoints {
        branches.push(match read_lineage(checkpoint) {
            Ok(None) if has_lost_metadata(checkpoint)? => {
                damaged.push(branches.len());
                None
            }
            Ok(lineage) => Some(lineage.map_or_else(Branch::default, |lineage| lineage.branch)),
            Err(_) if !checkpoint.exists()? => None,
            Err(error) if error.kind() == ErrorKind::Io => return Err(error),
            Err(error) => {
                warn!(path = %checkpoint, %error, "cannot read the lineage of a checkpoint");
                damaged.push(branches.len());
                None
            }
        });
    }
    let newest = newest_branch(&branches);
    for index in damaged {
        branches[index] = Some(newest.clone());
    }
    Ok(branches)
}

/// Reads the lineage of a checkpoint; `None` if none was recorded.
fn read_lineage(checkpoint: &Location) -> Result<Option<Lineage>, FileError> {
    // Checkpoints of some programs are single files.
    if checkpoint.local().is_some_and(Path::is_file) {
        return Ok(None);
    }
    CheckedDirectory::read_lineage(checkpoint)
}

/// Returns the branch that a run continues: the newest of its checkpoints' branches, which
/// [`read_branches`] has found.
#[must_use]
pub fn newest_branch(branches: &[Option<Branch>]) -> Branch {
    let newest = branches.iter().flatten().max_by_key(|branch| branch.number);
    newest.cloned().unwrap_or_default()
}

/// A checkpoint of a run, as [`list_chain`] found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its name in the run's directory.
    pub name: String,
    /// The digest of all its state; `None` if none was recorded.
    pub digest: Option<Digest>,
    /// Its lineage; `None` if none was recorded.
    pub lineage: Option<Lineage>,
    /// Everything that is noteworthy about its place in the chain.
    pub notes: Vec<Note>,
}

/// Something noteworthy about the place of a checkpoint in the chain of its run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Note {
    /// It cannot be opened, or was never committed.
    Unreadable {
        /// The reason, with its causes.
        reason: String,
        /// The kind of the reason.
        kind: ErrorKind,
        /// `false` if it was never committed: a save may be in progress.
        is_damage: bool,
    },
    /// No lineage was recorded, so its place in the chain is not known.
    NoLineage,
    /// Its parent is not among the run's checkpoints: it was removed, or belongs to another run.
    ParentIsElsewhere,
    /// The run has a checkpoint with the step of its parent, but with other state: one of the two
    /// was replaced.
    ParentIsAnother,
    /// Another checkpoint has the same parent.
    Fork {
        /// The name of the other one.
        other: String,
    },
    /// The configuration is not that of its parent.
    OtherConfig,
    /// The data is not that of its parent.
    OtherData,
    /// The position in the data is before that of its parent.
    DataAgain,
}

impl Note {
    /// Returns `true` if the chain is broken there: the checkpoint does not continue the state that
    /// the run has.
    #[must_use]
    pub fn is_break(&self) -> bool {
        matches!(self, Note::ParentIsAnother)
    }

    /// Returns `true` if the checkpoint is damaged, as far as its metadata tell.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            Note::Unreadable {
                is_damage: true,
                ..
            }
        )
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Note::Unreadable { reason, .. } => write!(f, "cannot be opened: {reason}"),
            Note::NoLineage => f.write_str("no lineage recorded"),
            Note::ParentIsElsewhere => f.write_str("its parent is not here"),
            Note::ParentIsAnother => {
                f.write_str("broken: the checkpoint with its parent's step has other state")
            }
            Note::Fork { other } => write!(f, "fork: `{other}` has the same parent"),
            Note::OtherConfig => f.write_str("another configuration than its parent"),
            Note::OtherData => f.write_str("other data than its parent"),
            Note::DataAgain => f.write_str("an earlier position in the data than its parent"),
        }
    }
}

/// Lists the checkpoints of a run ([`list_steps`]), each with its place in the chain, the oldest
/// first. One that cannot be opened has a note that says so. Only metadata and integrity files are
/// read.
///
/// # Errors
/// A directory that cannot be listed.
pub fn list_chain(run: impl Into<Location>) -> Result<Vec<Link>, FileError> {
    let mut links = Vec::new();
    for found in list_steps(run)? {
        let mut link = Link {
            name: found.name,
            digest: None,
            lineage: None,
            notes: Vec::new(),
        };
        match open_link(&found.path) {
            Ok(checkpoint) => {
                link.digest = checkpoint.digests().map(|digests| digests.root());
                link.lineage = checkpoint.lineage().cloned();
            }
            Err(error) => {
                let kind = error.kind();
                link.notes.push(Note::Unreadable {
                    reason: with_causes(&error),
                    kind,
                    is_damage: kind != ErrorKind::Incomplete
                        || matches!(has_lost_metadata(&found.path), Ok(true)),
                });
            }
        }
        links.push((found.step, link));
    }
    // Checkpoints of other programs and damaged ones have no lineage. The step in the name counts.
    links.sort_by_cached_key(|(step_in_name, link)| {
        let recorded_step = link.lineage.as_ref().map(|lineage| lineage.step);
        (recorded_step.unwrap_or(*step_in_name), link.name.clone())
    });
    let mut links: Vec<Link> = links.into_iter().map(|(_, link)| link).collect();
    add_notes(&mut links);
    Ok(links)
}

/// Opens a checkpoint of a run. A DCP directory is opened without the files of other programs
/// beside its own, of which no digests were recorded.
///
/// # Errors
/// The checkpoint cannot be opened.
fn open_link(path: &Location) -> Result<Box<dyn Checkpoint>, FileError> {
    check_has_metadata(path)?;
    if path.join(METADATA_FILE).is_file()? {
        return Ok(Box::new(CheckpointReader::open(path)?));
    }
    open(path, OpenOptions::default())
}

/// Notes where the chain is broken or forked, and what has changed from one checkpoint to the next.
fn add_notes(links: &mut [Link]) {
    let position_of_digest: BTreeMap<Digest, usize> = links
        .iter()
        .enumerate()
        .filter_map(|(index, link)| Some((link.digest?, index)))
        .collect();
    let mut first_children: BTreeMap<Digest, String> = BTreeMap::new();
    for index in 0..links.len() {
        let Some(lineage) = links[index].lineage.clone() else {
            // A checkpoint that cannot be opened has its note already.
            if links[index].notes.is_empty() {
                links[index].notes.push(Note::NoLineage);
            }
            continue;
        };
        let Some(parent) = lineage.parent else {
            continue;
        };
        match first_children.entry(parent.digest) {
            Entry::Occupied(sibling) => links[index].notes.push(Note::Fork {
                other: sibling.get().clone(),
            }),
            Entry::Vacant(vacant) => _ = vacant.insert(links[index].name.clone()),
        }
        // The parent is known by its state, since steps may come twice in the life of a run.
        let notes = match position_of_digest.get(&parent.digest) {
            Some(&position) => changes(links[position].lineage.as_ref(), &lineage),
            None => {
                let mut lineages = links.iter().filter_map(|link| link.lineage.as_ref());
                vec![if lineages.any(|lineage| lineage.step == parent.step) {
                    Note::ParentIsAnother
                } else {
                    Note::ParentIsElsewhere
                }]
            }
        };
        links[index].notes.extend(notes);
    }
}

/// Returns notes of what has changed from a checkpoint to its child; none if the parent has no
/// lineage.
fn changes(parent: Option<&Lineage>, child: &Lineage) -> Vec<Note> {
    let mut notes = Vec::new();
    let Some(parent) = parent else {
        return notes;
    };
    if parent.config != child.config {
        notes.push(Note::OtherConfig);
    }
    if let (Some(parent_data), Some(child_data)) = (&parent.data, &child.data) {
        if parent_data.hash != child_data.hash {
            notes.push(Note::OtherData);
        } else if child_data.position < parent_data.position {
            notes.push(Note::DataAgain);
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use fsdp_layout::PlainValue;

    use super::*;

    fn digest(of: i64) -> Digest {
        Digest::of_value(&PlainValue::Int(of))
    }

    fn link(step: u64, state: i64, parent: Option<(u64, i64)>) -> Link {
        let parent = parent.map(|(step, state)| Parent {
            step,
            digest: digest(state),
        });
        let data = Some(DataPosition {
            hash: "d".to_owned(),
            position: step * 10,
        });
        let lineage = Lineage {
            step,
            branch: Branch::default(),
            parent,
            config: Some("c".to_owned()),
            data,
        };
        Link {
            name: format!("step-{step}"),
            digest: Some(digest(state)),
            lineage: Some(lineage),
            notes: Vec::new(),
        }
    }

    fn notes(mut links: Vec<Link>) -> Vec<Vec<Note>> {
        add_notes(&mut links);
        links.into_iter().map(|link| link.notes).collect()
    }

    #[test]
    fn a_chain_that_is_whole_has_no_notes() {
        let links = vec![
            link(1, 1, None),
            link(2, 2, Some((1, 1))),
            link(3, 3, Some((2, 2))),
        ];
        assert!(notes(links).concat().is_empty());
    }

    #[test]
    fn breaks_forks_and_changes_are_noted() {
        let fork = Note::Fork {
            other: "step-2".to_owned(),
        };
        let of_two = vec![
            link(1, 1, None),
            link(2, 2, Some((1, 1))),
            link(3, 3, Some((1, 1))),
        ];
        assert_eq!(notes(of_two), [vec![], vec![], vec![fork]]);
        // The state of step 2 was replaced after step 3 had grown out of it; the parent of step 1
        // was removed.
        let broken = vec![
            link(1, 1, Some((0, 0))),
            link(2, 7, Some((1, 1))),
            link(3, 3, Some((2, 2))),
        ];
        assert_eq!(
            notes(broken),
            [
                vec![Note::ParentIsElsewhere],
                vec![],
                vec![Note::ParentIsAnother]
            ]
        );
        let mut changed = vec![link(1, 1, None), link(2, 2, Some((1, 1)))];
        changed[1].lineage.as_mut().unwrap().config = None;
        changed[1]
            .lineage
            .as_mut()
            .unwrap()
            .data
            .as_mut()
            .unwrap()
            .position = 3;
        assert_eq!(
            notes(changed),
            [vec![], vec![Note::OtherConfig, Note::DataAgain]]
        );
        let mut unknown = vec![link(1, 1, None)];
        unknown[0].lineage = None;
        assert_eq!(notes(unknown), [[Note::NoLineage]]);
    }
}
