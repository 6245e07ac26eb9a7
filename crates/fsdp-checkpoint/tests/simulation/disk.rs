//! A disk that forgets: what was not synced may be lost, torn or reordered when the power fails.
//!
//! Each directory has two lists of names, the one that programs see and the one that survives. A
//! change of names (a file created, something renamed or removed) is one step that survives as a
//! whole or not at all; syncing a directory makes all changes that touch it survive. A file has two
//! contents in the same way, and a list of writes since its last sync.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path};

use fsdp_formats::storage::{EntryKind, Identity, LockKind, Status};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The number of a file or directory.
pub(crate) type Inode = u64;

/// The directory that all paths begin at.
const ROOT: Inode = 1;

#[derive(Debug, Clone)]
enum Node {
    File(File),
    Directory(Directory),
}

#[derive(Debug, Clone, Default)]
struct File {
    /// The content that programs see.
    now: Vec<u8>,
    /// The content that survives a loss of power.
    durable: Vec<u8>,
    /// The writes since the last sync.
    pending: Vec<Write>,
    mode: u32,
}

/// A write to a file that was not synced yet.
#[derive(Debug, Clone)]
enum Write {
    /// Bytes at an offset.
    Bytes(u64, Vec<u8>),
    /// A new length.
    Length(u64),
}

#[derive(Debug, Clone, Default)]
struct Directory {
    /// The names that programs see.
    now: BTreeMap<String, Inode>,
    /// The names that survive a loss of power.
    durable: BTreeMap<String, Inode>,
    mode: u32,
}

/// A change of names that survives as a whole: directory, name, and what has that name afterwards.
#[derive(Debug, Clone)]
struct Change(Vec<(Inode, String, Option<Inode>)>);

impl Change {
    fn touches(&self, directory: Inode) -> bool {
        self.0.iter().any(|(at, ..)| *at == directory)
    }

    fn shares_a_name(&self, other: &Change) -> bool {
        self.0.iter().any(|(at, name, _)| {
            other
                .0
                .iter()
                .any(|(with, its, _)| at == with && name == its)
        })
    }
}

/// How much a loss of power takes of what was not synced.
#[derive(Debug, Clone, Copy)]
enum Loss {
    Nothing,
    Everything,
    /// All that came after some moment.
    TheEnd,
    /// Some of it, in any order.
    Some,
}

/// A simulated disk.
#[derive(Debug)]
pub(crate) struct Disk {
    nodes: BTreeMap<Inode, Node>,
    /// The changes of names that were not synced, in order.
    changes: Vec<Change>,
    /// The locks on each file: the holders, and the kind of lock that each has.
    locks: BTreeMap<Inode, BTreeMap<u64, LockKind>>,
    /// The last number that was given out.
    last: u64,
}

fn error(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

/// The codes of the system that the disk returns.
const NOT_FOUND: i32 = 2;
pub(crate) const IO: i32 = 5;
const EXISTS: i32 = 17;
const NOT_A_DIRECTORY: i32 = 20;
const IS_A_DIRECTORY: i32 = 21;
pub(crate) const NO_SPACE: i32 = 28;
pub(crate) const NOT_SUPPORTED: i32 = 38;

impl Disk {
    pub(crate) fn new() -> Self {
        let nodes = [(
            ROOT,
            Node::Directory(Directory {
                mode: 0o755,
                ..Directory::default()
            }),
        )]
        .into();
        Disk {
            nodes,
            changes: Vec::new(),
            locks: BTreeMap::new(),
            last: ROOT + 1,
        }
    }

    /// Returns a number that was not given out before.
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn directory(&self, inode: Inode) -> io::Result<&Directory> {
        match self.nodes.get(&inode) {
            Some(Node::Directory(directory)) => Ok(directory),
            Some(Node::File(_)) => Err(error(NOT_A_DIRECTORY)),
            None => Err(error(NOT_FOUND)),
        }
    }

    fn file(&self, inode: Inode) -> io::Result<&File> {
        match self.nodes.get(&inode) {
            Some(Node::File(file)) => Ok(file),
            Some(Node::Directory(_)) => Err(error(IS_A_DIRECTORY)),
            None => Err(error(NOT_FOUND)),
        }
    }

    fn file_mut(&mut self, inode: Inode) -> io::Result<&mut File> {
        match self.nodes.get_mut(&inode) {
            Some(Node::File(file)) => Ok(file),
            _ => Err(error(NOT_FOUND)),
        }
    }

    /// Returns what has a name in a directory.
    pub(crate) fn lookup(&self, directory: Inode, name: &str) -> io::Result<Inode> {
        self.directory(directory)?
            .now
            .get(name)
            .copied()
            .ok_or_else(|| error(NOT_FOUND))
    }

    /// Returns what is at a path.
    pub(crate) fn resolve(&self, path: &Path) -> io::Result<Inode> {
        path.components().try_fold(ROOT, |at, part| match part {
            Component::Normal(name) => self.lookup(at, &name.to_string_lossy()),
            _ => Ok(at),
        })
    }

    /// Returns the directory of a path, and its name there.
    fn split(&self, path: &Path) -> io::Result<(Inode, String)> {
        let name = path
            .file_name()
            .ok_or_else(|| error(EXISTS))?
            .to_string_lossy()
            .into_owned();
        Ok((self.resolve(path.parent().unwrap_or(Path::new("/")))?, name))
    }

    /// Makes a change of names: in those that survive if it is `durable`, else in those that
    /// programs see.
    fn apply(directories: &mut BTreeMap<Inode, Node>, change: &Change, durable: bool) {
        for (directory, name, inode) in &change.0 {
            let Some(Node::Directory(directory)) = directories.get_mut(directory) else {
                continue;
            };
            let names = if durable {
                &mut directory.durable
            } else {
                &mut directory.now
            };
            match inode {
                Some(inode) => names.insert(name.clone(), *inode),
                None => names.remove(name),
            };
        }
    }

    /// Makes a change that programs see at once, and that is durable only when its directory is
    /// synced.
    fn change(&mut self, change: Vec<(Inode, String, Option<Inode>)>) {
        let change = Change(change);
        Self::apply(&mut self.nodes, &change, false);
        self.changes.push(change);
    }

    /// Makes a change survive, and those before it that it builds on.
    fn settle(&mut self, index: usize) {
        let mut settled = BTreeSet::from([index]);
        for earlier in (0..index).rev() {
            if settled
                .iter()
                .any(|&later| self.changes[earlier].shares_a_name(&self.changes[later]))
            {
                settled.insert(earlier);
            }
        }
        for &index in &settled {
            Self::apply(&mut self.nodes, &self.changes[index], true);
        }
        let mut at = 0;
        self.changes.retain(|_| {
            at += 1;
            !settled.contains(&(at - 1))
        });
    }

    pub(crate) fn status(&self, path: &Path) -> io::Result<Status> {
        let inode = self.resolve(path)?;
        let (kind, mode) = match self.nodes.get(&inode) {
            Some(Node::Directory(directory)) => (EntryKind::Directory, directory.mode),
            Some(Node::File(file)) => (EntryKind::File, file.mode),
            None => return Err(error(NOT_FOUND)),
        };
        Ok(Status {
            kind,
            identity: Identity(0, inode),
            mode,
        })
    }

    pub(crate) fn list(&self, path: &Path) -> io::Result<Vec<(String, EntryKind)>> {
        let names = &self.directory(self.resolve(path)?)?.now;
        let kind = |inode| match self.nodes.get(inode) {
            Some(Node::Directory(_)) => EntryKind::Directory,
            _ => EntryKind::File,
        };
        Ok(names
            .iter()
            .map(|(name, inode)| (name.clone(), kind(inode)))
            .collect())
    }

    /// Puts a new file or directory at a path. It is an error if something is there.
    fn create(&mut self, path: &Path, node: Node) -> io::Result<Inode> {
        let (directory, name) = self.split(path)?;
        if self.directory(directory)?.now.contains_key(&name) {
            return Err(error(EXISTS));
        }
        let inode = self.number();
        self.nodes.insert(inode, node);
        self.change(vec![(directory, name, Some(inode))]);
        Ok(inode)
    }

    pub(crate) fn create_directory(&mut self, path: &Path) -> io::Result<()> {
        self.create(
            path,
            Node::Directory(Directory {
                mode: 0o755,
                ..Directory::default()
            }),
        )
        .map(drop)
    }

    pub(crate) fn create_file(&mut self, path: &Path) -> io::Result<Inode> {
        self.create(
            path,
            Node::File(File {
                mode: 0o644,
                ..File::default()
            }),
        )
    }

    pub(crate) fn set_mode(&mut self, path: &Path, to: u32) -> io::Result<()> {
        let inode = self.resolve(path)?;
        match self.nodes.get_mut(&inode) {
            Some(Node::Directory(directory)) => directory.mode = to,
            Some(Node::File(file)) => file.mode = to,
            None => return Err(error(NOT_FOUND)),
        }
        Ok(())
    }

    pub(crate) fn set_length(&mut self, inode: Inode, length: u64) -> io::Result<()> {
        let file = self.file_mut(inode)?;
        file.now.resize(length as usize, 0);
        file.pending.push(Write::Length(length));
        Ok(())
    }

    pub(crate) fn write(&mut self, inode: Inode, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let file = self.file_mut(inode)?;
        put(&mut file.now, offset, bytes);
        file.pending.push(Write::Bytes(offset, bytes.to_vec()));
        Ok(())
    }

    pub(crate) fn sync_file(&mut self, inode: Inode) -> io::Result<()> {
        let file = self.file_mut(inode)?;
        file.durable = file.now.clone();
        file.pending.clear();
        Ok(())
    }

    /// Forgets that a file has writes that were not synced, as systems do after a failed sync: they
    /// never will be.
    pub(crate) fn give_up_writes(&mut self, inode: Inode) -> io::Result<()> {
        self.file_mut(inode)?.pending.clear();
        Ok(())
    }

    pub(crate) fn sync_directory(&mut self, path: &Path) -> io::Result<()> {
        let directory = self.resolve(path)?;
        self.directory(directory)?;
        while let Some(index) = self
            .changes
            .iter()
            .position(|change| change.touches(directory))
        {
            self.settle(index);
        }
        Ok(())
    }

    /// Renames over whatever is there.
    pub(crate) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let ((from, old), (to, new)) = (self.split(from)?, self.split(to)?);
        let inode = self.lookup(from, &old)?;
        self.change(vec![(from, old, None), (to, new, Some(inode))]);
        Ok(())
    }

    pub(crate) fn exchange(&mut self, a: &Path, b: &Path) -> io::Result<()> {
        let ((at_a, a), (at_b, b)) = (self.split(a)?, self.split(b)?);
        let (inode_a, inode_b) = (self.lookup(at_a, &a)?, self.lookup(at_b, &b)?);
        self.change(vec![(at_a, a, Some(inode_b)), (at_b, b, Some(inode_a))]);
        Ok(())
    }

    pub(crate) fn link(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let inode = self.resolve(from)?;
        self.file(inode)?;
        let (directory, name) = self.split(to)?;
        if self.directory(directory)?.now.contains_key(&name) {
            return Err(error(EXISTS));
        }
        self.change(vec![(directory, name, Some(inode))]);
        Ok(())
    }

    /// Removes the name of a file, or of a directory that holds nothing.
    pub(crate) fn remove(&mut self, path: &Path) -> io::Result<()> {
        let (directory, name) = self.split(path)?;
        let inode = self.lookup(directory, &name)?;
        if self
            .directory(inode)
            .is_ok_and(|directory| !directory.now.is_empty())
        {
            return Err(error(EXISTS));
        }
        self.change(vec![(directory, name, None)]);
        Ok(())
    }

    /// Empties a file under all its names.
    pub(crate) fn truncate(&mut self, path: &Path) -> io::Result<()> {
        let inode = self.resolve(path)?;
        let file = self.file_mut(inode)?;
        file.now.clear();
        file.durable.clear();
        Ok(())
    }

    pub(crate) fn read(&self, inode: Inode, offset: u64, dst: &mut [u8]) -> io::Result<()> {
        let bytes = &self.file(inode)?.now;
        let end = (offset as usize)
            .checked_add(dst.len())
            .filter(|&end| end <= bytes.len());
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        dst.copy_from_slice(&bytes[offset as usize..end]);
        Ok(())
    }

    pub(crate) fn length(&self, inode: Inode) -> io::Result<u64> {
        Ok(self.file(inode)?.now.len() as u64)
    }

    /// Returns a number for somebody who takes locks.
    pub(crate) fn holder(&mut self) -> u64 {
        self.number()
    }

    /// Takes a lock, which replaces the one that this holder may have. Returns `false` if others
    /// hold it.
    pub(crate) fn try_lock(&mut self, inode: Inode, holder: u64, kind: LockKind) -> bool {
        let held = self.locks.entry(inode).or_default();
        let mut others = held.iter().filter(|(other, _)| **other != holder);
        let is_free =
            others.all(|(_, theirs)| kind == LockKind::Shared && *theirs == LockKind::Shared);
        if is_free {
            held.insert(holder, kind);
        }
        is_free
    }

    pub(crate) fn unlock(&mut self, inode: Inode, holder: u64) {
        if let Some(held) = self.locks.get_mut(&inode) {
            held.remove(&holder);
        }
    }

    /// Ends all programs by a loss of power: what was not synced may be gone.
    pub(crate) fn lose_power(&mut self, seed: u64) {
        let mut random = StdRng::seed_from_u64(seed);
        let losses = [
            Loss::Nothing,
            Loss::Everything,
            Loss::TheEnd,
            Loss::Some,
            Loss::Some,
        ];
        let of_names = losses[random.random_range(0..losses.len())];
        let count = self.changes.len();
        let end = random.random_range(0..=count);
        let kept: Vec<usize> = (0..count)
            .filter(|&index| match of_names {
                Loss::Nothing => true,
                Loss::Everything => false,
                Loss::TheEnd => index < end,
                Loss::Some => random.random(),
            })
            .collect();
        // Settling a change removes it, and those that it builds on, from the list. All of these
        // come before the changes that are still to be settled, so the positions of the latter go
        // down by the number that is gone.
        for index in kept {
            let gone = count - self.changes.len();
            if let Some(index) = index.checked_sub(gone) {
                self.settle(index);
            }
        }
        self.changes.clear();
        self.locks.clear();
        let of_bytes = losses[random.random_range(0..losses.len())];
        for node in self.nodes.values_mut() {
            match node {
                Node::Directory(directory) => directory.now = directory.durable.clone(),
                Node::File(file) => file.lose_power(of_bytes, &mut random),
            }
        }
        self.forget_unreachable();
    }

    /// Forgets the files and directories that no name leads to.
    fn forget_unreachable(&mut self) {
        let mut reached = BTreeSet::from([ROOT]);
        let mut left = vec![ROOT];
        while let Some(inode) = left.pop() {
            let Ok(directory) = self.directory(inode) else {
                continue;
            };
            left.extend(
                directory
                    .now
                    .values()
                    .filter(|inode| !reached.contains(*inode)),
            );
            reached.extend(directory.now.values());
        }
        self.nodes.retain(|inode, _| reached.contains(inode));
    }
}

impl File {
    /// Leaves in the file what survives: its durable content, and some of the writes since the last
    /// sync.
    fn lose_power(&mut self, loss: Loss, random: &mut StdRng) {
        let end = random.random_range(0..=self.pending.len());
        let mut bytes = std::mem::take(&mut self.durable);
        for (index, write) in self.pending.drain(..).enumerate() {
            let is_kept = match loss {
                Loss::Nothing => true,
                Loss::Everything => false,
                Loss::TheEnd => index < end,
                Loss::Some => random.random(),
            };
            match write {
                Write::Length(length) if is_kept => bytes.resize(length as usize, 0),
                Write::Bytes(offset, written) if is_kept => {
                    // A write may be torn: only its beginning survives.
                    let is_torn =
                        matches!(loss, Loss::TheEnd | Loss::Some) && random.random_bool(0.3);
                    let length = if is_torn {
                        random.random_range(0..=written.len())
                    } else {
                        written.len()
                    };
                    put(&mut bytes, offset, &written[..length]);
                }
                _ => {}
            }
        }
        self.durable = bytes.clone();
        self.now = bytes;
    }
}

/// Writes bytes at a position, beyond the end if need be.
fn put(file: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let (start, end) = (offset as usize, offset as usize + bytes.len());
    if file.len() < end {
        file.resize(end, 0);
    }
    file[start..end].copy_from_slice(bytes);
}
