//! The checkpoints that must be on the disk, and those that may be there, by what the programs were
//! told.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};

/// The facts about one place of a checkpoint.
#[derive(Debug, Clone, Default)]
struct Record {
    /// The version that a save has confirmed.
    confirmed: Option<u64>,
    /// The versions whose saves began after that, and were not confirmed.
    begun: Vec<u64>,
    /// `true` if a removal of it has begun.
    may_be_gone: bool,
}

/// The places of checkpoints, by their names.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    records: BTreeMap<String, Record>,
}

impl Journal {
    /// Notes that a save has begun.
    pub(crate) fn begin(&mut self, name: &str, version: u64) {
        self.records
            .entry(name.to_owned())
            .or_default()
            .begun
            .push(version);
    }

    /// Notes that a save has succeeded; each rank is told.
    pub(crate) fn confirm(&mut self, name: &str, version: u64) {
        let record = self.records.entry(name.to_owned()).or_default();
        // A slow rank may be told of its save after others have confirmed a later one.
        if record.confirmed.is_none_or(|confirmed| confirmed < version) {
            let begun = record
                .begun
                .iter()
                .copied()
                .filter(|begun| *begun > version)
                .collect();
            *record = Record {
                confirmed: Some(version),
                begun,
                may_be_gone: false,
            };
        }
    }

    /// Notes that of all saves to a place, this one has succeeded, and none may succeed after it.
    pub(crate) fn confirm_only(&mut self, name: &str, version: u64) {
        let record = Record {
            confirmed: Some(version),
            ..Record::default()
        };
        self.records.insert(name.to_owned(), record);
    }

    /// Notes that a removal has begun.
    pub(crate) fn begin_removal(&mut self, name: &str) {
        self.records.entry(name.to_owned()).or_default().may_be_gone = true;
    }

    /// Returns the name of the newest step whose checkpoint must be there.
    pub(crate) fn newest(&self) -> Option<&str> {
        let mut steps = self
            .records
            .iter()
            .rev()
            .filter(|(name, _)| name.starts_with("step-"));
        let (name, _) =
            steps.find(|(_, record)| record.confirmed.is_some() && !record.may_be_gone)?;
        Some(name)
    }

    /// Compares a place with what was found there.
    pub(crate) fn check(&self, name: &str, found: Option<u64>) -> Result<()> {
        let Some(record) = self.records.get(name) else {
            ensure!(found.is_none(), "nobody saved `{name}`");
            return Ok(());
        };
        let is_allowed = match found {
            Some(found) => record.confirmed == Some(found) || record.begun.contains(&found),
            None => record.confirmed.is_none() || record.may_be_gone,
        };
        if !is_allowed {
            bail!("`{name}` holds {found:?}, but the programs were told {record:?}");
        }
        Ok(())
    }

    /// Returns the names of all places.
    pub(crate) fn names(&self) -> Vec<String> {
        self.records.keys().cloned().collect()
    }

    /// Notes what is at a place after a loss of power. It has survived that, so it is durable, and
    /// it must be there from now on.
    pub(crate) fn settle(&mut self, name: &str, found: Option<u64>) {
        match found {
            Some(found) => {
                let record = Record {
                    confirmed: Some(found),
                    ..Record::default()
                };
                self.records.insert(name.to_owned(), record);
            }
            None => {
                self.records.remove(name);
            }
        }
    }
}
