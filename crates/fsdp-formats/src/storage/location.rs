//! The place of a checkpoint: a path, or the URL of an object store.

use std::cmp::Ordering;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::backend::{EntryKind, Links, Storage, UnusableUrl};
use super::file_system::FileSystem;
use super::fs::utf8_name;
use super::local::LocalStorage;
use super::paths::check_relative;
use super::read_at::read_file;
use crate::error::{FileError, LocationError};

/// The place of a checkpoint, or of a directory of checkpoints.
///
/// It is made from a path or a URL. That opens and checks nothing; an error in the URL is returned
/// by the first operation on the location.
///
/// | URL | is |
/// |---|---|
/// | `file:///DIR/NAME` | a path |
/// | `s3://BUCKET/PREFIX` | Amazon S3 and compatible stores; settings from `AWS_*`, as for the AWS tools |
/// | `gs://BUCKET/PREFIX` | Google Cloud Storage; settings from `GOOGLE_*` |
/// | `az://CONTAINER/PREFIX` | Azure Blob Storage; settings from `AZURE_STORAGE_*` |
///
/// Object stores need the cargo feature `object-store`. A URL is taken literally: `%20` in it is
/// three characters of a key. Credentials come from the environment, never from the URL.
///
/// ```
/// use std::path::Path;
/// use fsdp_formats::Location;
///
/// let run = Location::from("s3://models/runs/7");
/// assert_eq!(run.join("step-20").to_string(), "s3://models/runs/7/step-20");
/// assert_eq!(run.local(), None);
/// assert_eq!(Location::from("file:///data/run").local(), Some(Path::new("/data/run")));
/// ```
#[derive(Clone)]
pub struct Location {
    /// For a URL that cannot be used, the error that every operation returns.
    storage: Result<Arc<dyn Storage>, UnusableUrl>,
}

/// The settings of an object store: names and values.
type Settings = Vec<(String, String)>;

#[cfg(feature = "object-store")]
impl Location {
    /// Makes the location of a URL in an object store, with settings that take precedence over
    /// those of the environment. Their names are those of [`object_store`]: `aws_endpoint`,
    /// `aws_access_key_id`, `google_service_account`, ...
    #[must_use]
    pub fn with_settings(url: &str, settings: impl IntoIterator<Item = (String, String)>) -> Self {
        Self::from_url(url, settings.into_iter().collect())
            .unwrap_or_else(|| Self::from_path(url.into()))
    }

    /// Makes the location of a prefix in an object store that the caller has set up.
    ///
    /// `name` is the name of the store in messages, for example its URL. A client with TLS needs a
    /// cryptography provider, which the caller must install ([`rustls`]' `install_default`).
    #[must_use]
    pub fn with_store(store: Arc<dyn super::object::Store>, name: &str, prefix: &str) -> Self {
        let name = PathBuf::from(name).join(prefix);
        if !is_key(prefix) {
            return Self::unusable(name, LocationError::Key);
        }
        Self::in_bucket(super::object::Bucket::new(store), prefix, name)
    }

    fn in_bucket(bucket: super::object::Bucket, prefix: &str, name: PathBuf) -> Self {
        Self::with_storage(Arc::new(super::object::ObjectStorage::new(
            Arc::new(bucket),
            prefix.to_owned(),
            name,
        )))
    }
}

impl Location {
    fn from_path(path: PathBuf) -> Self {
        Self::with_storage(Arc::new(LocalStorage::new(path)))
    }

    /// Makes the location of a path in a file system that the caller implements.
    #[must_use]
    pub fn within(files: Arc<dyn FileSystem>, path: impl Into<PathBuf>) -> Self {
        Self::with_storage(Arc::new(LocalStorage::within(files, path.into())))
    }

    fn unusable(name: PathBuf, reason: LocationError) -> Self {
        Location {
            storage: Err(UnusableUrl { name, reason }),
        }
    }

    /// Makes a location of a place in any kind of storage.
    pub(crate) fn with_storage(storage: Arc<dyn Storage>) -> Self {
        Location {
            storage: Ok(storage),
        }
    }

    /// Reads a URL; `None` if the text is a path.
    fn from_url(text: &str, settings: Settings) -> Option<Self> {
        let (scheme, rest) = text.split_once("://")?;
        // A path such as `c://d` is not a URL.
        if !is_scheme(scheme) {
            return None;
        }
        let (authority, key) = rest.split_once('/').unwrap_or((rest, ""));
        // The name for messages leaves out what might be a secret: a user name, and a query.
        let shown_authority = authority
            .rsplit_once('@')
            .map_or(authority, |(_user, host)| host);
        let shown_key = without_query(key).trim_end_matches('/');
        let shown = match shown_key {
            "" => format!("{scheme}://{shown_authority}"),
            key => format!("{scheme}://{shown_authority}/{key}"),
        };
        let name = PathBuf::from(without_query(&shown));
        if authority.contains('@') || rest.contains('?') {
            return Some(Self::unusable(name, LocationError::Credentials));
        }
        if scheme == "file" {
            // Another host than this one cannot be reached by a path.
            return Some(match authority {
                "" | "localhost" => Self::from_path(PathBuf::from(format!("/{key}"))),
                _ => Self::unusable(name, LocationError::Host),
            });
        }
        // The rest are object stores, whose keys must be plain paths, as those in a checkpoint are.
        if !["s3", "gs", "az"].contains(&scheme) {
            return Some(Self::unusable(name, LocationError::Scheme));
        }
        if authority.is_empty() {
            return Some(Self::unusable(name, LocationError::Host));
        }
        if !is_key(shown_key) {
            return Some(Self::unusable(name, LocationError::Key));
        }
        Some(Self::in_object_store(
            scheme, authority, shown_key, name, settings,
        ))
    }

    #[cfg(feature = "object-store")]
    fn in_object_store(
        scheme: &str,
        bucket: &str,
        key: &str,
        name: PathBuf,
        settings: Settings,
    ) -> Self {
        let bucket = super::object::Bucket::from_url(scheme, bucket, settings);
        Self::in_bucket(bucket, key, name)
    }

    #[cfg(not(feature = "object-store"))]
    fn in_object_store(_: &str, _: &str, _: &str, name: PathBuf, _: Settings) -> Self {
        Self::unusable(name, LocationError::NotBuilt)
    }

    /// Returns the storage through which this location is read and written.
    pub(crate) fn storage(&self) -> Result<&dyn Storage, FileError> {
        match &self.storage {
            Ok(storage) => Ok(&**storage),
            Err(UnusableUrl { name, reason }) => Err(FileError::Location {
                path: name.clone(),
                source: *reason,
            }),
        }
    }

    /// Returns the path, if this is one.
    #[must_use]
    pub fn local(&self) -> Option<&Path> {
        self.storage.as_ref().ok()?.local()
    }

    /// Returns its name for messages: the path, or the URL.
    #[must_use]
    pub fn name(&self) -> &Path {
        match &self.storage {
            Ok(storage) => storage.name(),
            Err(url) => &url.name,
        }
    }

    /// Returns the location of this name below this one. A name that its storage cannot have is an
    /// error when the location is used.
    #[must_use]
    pub fn join(&self, below: impl AsRef<str>) -> Location {
        let below = below.as_ref();
        let storage = match &self.storage {
            Ok(storage) => storage.child(below),
            Err(UnusableUrl { name, reason }) => Err(UnusableUrl {
                name: name.join(below),
                reason: *reason,
            }),
        };
        Location { storage }
    }

    /// Returns the directory or prefix that contains it, and its name there.
    #[doc(hidden)]
    pub fn split(&self) -> Result<(Location, &str), FileError> {
        let parent = self.storage()?.parent();
        Ok((Self::with_storage(parent), utf8_name("open", self.name())?))
    }

    /// Returns `true` if anything is here: a file or directory, an object, or objects below it.
    ///
    /// # Errors
    /// A URL that cannot be used; a store that does not answer.
    pub fn exists(&self) -> Result<bool, FileError> {
        self.storage()?.exists()
    }

    /// Checks that a checkpoint or a file that is written here can have this name, and that nothing
    /// is here but, perhaps, a file or a directory. A symbolic link is not followed: replacing it
    /// would leave what it leads to as it is, and replacing that might change what others share.
    ///
    /// # Errors
    /// [`FileError::Irreplaceable`]; a name that is too long; a URL that cannot be used.
    pub fn check_target(&self) -> Result<(), FileError> {
        self.storage()?.check_target()
    }

    /// Returns the names of the entries directly in it, sorted: files, and directories or prefixes.
    ///
    /// # Errors
    /// The errors of [`Location::exists`], and a directory that does not exist.
    pub fn names(&self) -> Result<Vec<String>, FileError> {
        self.storage()?.names()
    }

    /// Returns the paths of all files below it, at any depth, sorted.
    ///
    /// # Errors
    /// The errors of [`Location::names`]; a link or a device below it, or a name that is not UTF-8.
    pub fn files(&self) -> Result<Vec<String>, FileError> {
        self.storage()?.files()
    }

    /// Reads all of the file or object at this location.
    ///
    /// # Errors
    /// The errors of [`Location::exists`]; there is no file; it has more than `limit` bytes.
    pub fn read_file(&self, limit: u64) -> Result<Vec<u8>, FileError> {
        let (directory, name) = self.split()?;
        let file = directory.storage()?.open(Links::Follow)?.file(name)?;
        read_file(&*file, limit).map_err(|error| error.in_file(self.name()))
    }

    /// Returns `true` if a directory is here, or the objects of one.
    ///
    /// # Errors
    /// The errors of [`Location::exists`].
    pub fn is_directory(&self) -> Result<bool, FileError> {
        Ok(self.storage()?.kind()? == Some(EntryKind::Directory))
    }

    /// Returns `true` if a file or an object is here.
    ///
    /// # Errors
    /// The errors of [`Location::exists`].
    pub fn is_file(&self) -> Result<bool, FileError> {
        Ok(self.storage()?.kind()? == Some(EntryKind::File))
    }
}

/// Returns `true` if a text is the scheme of a URL. A single letter is not one, because it may be a
/// drive.
fn is_scheme(text: &str) -> bool {
    text.len() > 1
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

/// Returns `true` if a text can be the key of an object that a checkpoint has, or the end of one.
fn is_key(key: &str) -> bool {
    key.is_empty() || check_relative(key).is_ok()
}

/// Cuts off the query of a URL, or of a part of one.
fn without_query(text: &str) -> &str {
    text.split_once('?').map_or(text, |(before, _query)| before)
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name().display().fmt(f)
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.name(), f)
    }
}

// Locations are compared by their names.
impl PartialEq for Location {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Location {}

impl PartialOrd for Location {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Location {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name().cmp(other.name())
    }
}

/// Paths, and texts that are paths or URLs.
impl<P: Into<PathBuf>> From<P> for Location {
    fn from(path: P) -> Self {
        let path = path.into();
        path.to_str()
            .and_then(|text| Self::from_url(text, Settings::new()))
            .unwrap_or_else(|| Self::from_path(path))
    }
}

impl From<&Location> for Location {
    fn from(location: &Location) -> Self {
        location.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_paths() {
        for path in ["a", "./a", "/a/b", "a:b", "a//b", "", "c://d", "/s3://x"] {
            let location = Location::from(path);
            assert_eq!(location.local(), Some(Path::new(path)));
            assert_eq!(
                location.join("x").local(),
                Some(Path::new(path).join("x").as_path())
            );
        }
        assert_eq!(
            Location::from("file:///a/b").local(),
            Some(Path::new("/a/b"))
        );
        assert_eq!(
            Location::from("file://localhost/a").local(),
            Some(Path::new("/a"))
        );
        assert_eq!(
            Location::from("a").split().unwrap().0.local(),
            Some(Path::new("."))
        );
    }

    #[test]
    fn urls_that_lead_nowhere_say_why_and_keep_secrets() {
        for (url, reason, shown) in [
            ("ftp://h/x", LocationError::Scheme, "ftp://h/x"),
            ("file://host/x", LocationError::Host, "file://host/x"),
            ("s3:///x", LocationError::Host, "s3:///x"),
            ("s3://id:secret@b/x", LocationError::Credentials, "s3://b/x"),
            (
                "az://c/x?sig=secret",
                LocationError::Credentials,
                "az://c/x",
            ),
            ("az://c?sig=secret/x", LocationError::Credentials, "az://c"),
            ("s3://b/a/../x", LocationError::Key, "s3://b/a/../x"),
            ("s3://b/a//x", LocationError::Key, "s3://b/a//x"),
        ] {
            let location = Location::from(url);
            assert_eq!(
                (location.to_string().as_str(), location.local()),
                (shown, None)
            );
            match location.exists().unwrap_err() {
                FileError::Location { source, path } => {
                    assert_eq!((source, path.as_path()), (reason, Path::new(shown)));
                }
                other => panic!("{url}: {other}"),
            }
            assert!(location.join("x").exists().is_err());
        }
    }

    #[cfg(not(feature = "object-store"))]
    #[test]
    fn without_the_feature_the_error_says_how_to_build() {
        let error = crate::reader::CheckpointReader::open("s3://bucket/x").unwrap_err();
        assert!(
            matches!(
                error,
                FileError::Location {
                    source: LocationError::NotBuilt,
                    ..
                }
            ),
            "{error}"
        );
        assert!(
            std::error::Error::source(&error)
                .unwrap()
                .to_string()
                .contains("--features object-store")
        );
    }
}
