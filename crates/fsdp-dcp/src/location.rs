//! Where a checkpoint is: a path, or the URL of an object store.

use std::cmp::Ordering;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
#[cfg(feature = "object-store")]
use std::sync::Arc;

use crate::error::{CheckpointError, LocationError};
#[cfg(feature = "object-store")]
use crate::object::{Bucket, Prefix, Store};

/// Where a checkpoint, or a directory of checkpoints, is.
///
/// Made from whatever names it: a path, or a URL. Nothing is opened or checked by that; whoever uses the location says
/// what is wrong with it.
///
/// | URL | is |
/// |---|---|
/// | `file:///DIR/NAME` | a path |
/// | `s3://BUCKET/PREFIX` | Amazon S3 and whatever speaks its protocol; settings from `AWS_*`, as the AWS tools have them |
/// | `gs://BUCKET/PREFIX` | Google Cloud Storage; settings from `GOOGLE_*` |
/// | `az://CONTAINER/PREFIX` | Azure Blob Storage; settings from `AZURE_STORAGE_*` |
///
/// Object stores need the cargo feature `object-store`. A URL is taken literally: `%20` in it is three characters of a
/// key. Credentials come from the environment, never from the URL.
///
/// ```
/// use std::path::Path;
/// use fsdp_dcp::Location;
///
/// let run = Location::from("s3://models/runs/7");
/// assert_eq!(run.join("step-20").to_string(), "s3://models/runs/7/step-20");
/// assert_eq!(run.local(), None);
/// assert_eq!(Location::from("file:///data/run").local(), Some(Path::new("/data/run")));
/// ```
#[derive(Clone)]
pub struct Location {
    /// The path, or the URL without anything secret in it.
    name: PathBuf,
    place: Place,
}

#[derive(Clone)]
enum Place {
    Local,
    /// A URL that leads nowhere, and why.
    Nowhere(LocationError),
    #[cfg(feature = "object-store")]
    Object(Arc<Bucket>, String),
}

/// Names and values.
type Settings = Vec<(String, String)>;

impl Location {
    /// A URL of an object store with settings of its own, which come before those of the environment. Their names are
    /// those of [`object_store`]: `aws_endpoint`, `aws_access_key_id`, `google_service_account`, ...
    #[cfg(feature = "object-store")]
    #[must_use]
    pub fn with_settings(url: &str, settings: impl IntoIterator<Item = (String, String)>) -> Self {
        Self::of_url(url, settings.into_iter().collect()).unwrap_or_else(|| Self::of_path(url.into()))
    }

    /// A prefix in an object store that the caller has set up.
    ///
    /// `name` is what messages call it, the URL for instance. A client with TLS needs a provider of cryptography that
    /// the caller has installed ([`rustls`]' `install_default`).
    #[cfg(feature = "object-store")]
    #[must_use]
    pub fn with_store(store: Arc<dyn Store>, name: &str, prefix: &str) -> Self {
        let name = PathBuf::from(name).join(prefix);
        match is_key(prefix) {
            true => Location { name, place: Place::Object(Arc::new(Bucket::new(store)), prefix.to_owned()) },
            false => Location { name, place: Place::Nowhere(LocationError::Key) },
        }
    }

    /// Reads a URL; `None` if the text is a path.
    fn of_url(text: &str, settings: Settings) -> Option<Self> {
        let (scheme, rest) = text.split_once("://")?;
        let is_scheme = scheme.len() > 1
            && scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        if !is_scheme {
            return None;
        }
        let (authority, key) = rest.split_once('/').unwrap_or((rest, ""));
        // What might be a secret is not told in messages either.
        let shown_authority = authority.rsplit('@').next().unwrap_or_default();
        let shown_key = key.split('?').next().unwrap_or_default().trim_end_matches('/');
        let shown = match shown_key {
            "" => format!("{scheme}://{shown_authority}"),
            key => format!("{scheme}://{shown_authority}/{key}"),
        };
        let shown = shown.split('?').next().unwrap_or_default().to_owned();
        let place = match () {
            () if authority.contains('@') || rest.contains('?') => Err(LocationError::Credentials),
            () if scheme == "file" => match authority {
                "" | "localhost" => return Some(Self::of_path(PathBuf::from(format!("/{key}")))),
                _ => Err(LocationError::Host),
            },
            () if !["s3", "gs", "az"].contains(&scheme) => Err(LocationError::Scheme),
            () if authority.is_empty() => Err(LocationError::Host),
            () if !is_key(shown_key) => Err(LocationError::Key),
            () => Self::object(scheme, authority, shown_key, settings),
        };
        Some(Location { name: shown.into(), place: place.unwrap_or_else(Place::Nowhere) })
    }

    #[cfg(feature = "object-store")]
    fn object(scheme: &str, bucket: &str, key: &str, settings: Settings) -> Result<Place, LocationError> {
        Ok(Place::Object(Arc::new(Bucket::of_url(scheme, bucket, settings)), key.to_owned()))
    }

    #[cfg(not(feature = "object-store"))]
    fn object(_: &str, _: &str, _: &str, _: Settings) -> Result<Place, LocationError> {
        Err(LocationError::NotBuilt)
    }

    fn of_path(path: PathBuf) -> Self {
        Location { name: path, place: Place::Local }
    }

    /// The path, if it is one.
    #[must_use]
    pub fn local(&self) -> Option<&Path> {
        matches!(self.place, Place::Local).then_some(&self.name)
    }

    /// Its name for messages: the path, or the URL.
    #[must_use]
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// What lies below it under this name.
    #[must_use]
    pub fn join(&self, below: impl AsRef<str>) -> Location {
        let below = below.as_ref();
        let place = match &self.place {
            #[cfg(feature = "object-store")]
            Place::Object(bucket, prefix) => match is_key(below) {
                true => Place::Object(bucket.clone(), crate::object::join(prefix, below)),
                false => Place::Nowhere(LocationError::Key),
            },
            place => place.clone(),
        };
        Location { name: self.name.join(below), place }
    }

    /// The directory or prefix that it lies in, and its name there.
    pub(crate) fn split(&self) -> Result<(Location, &str), CheckpointError> {
        let name = self.name.file_name().and_then(|name| name.to_str()).ok_or_else(|| {
            let error = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it has no name in UTF-8");
            CheckpointError::io("open", &self.name)(error)
        })?;
        let parent = self.name.parent().unwrap_or(Path::new(""));
        let (parent, place) = match &self.place {
            #[cfg(feature = "object-store")]
            Place::Object(bucket, key) => {
                let above = key.rsplit_once('/').map_or("", |(above, _)| above);
                (parent, Place::Object(bucket.clone(), above.to_owned()))
            }
            place if parent.as_os_str().is_empty() => (Path::new("."), place.clone()),
            place => (parent, place.clone()),
        };
        Ok((Location { name: parent.to_owned(), place }, name))
    }

    /// Whether anything is there: a file or directory, an object, or objects below it.
    ///
    /// # Errors
    /// A URL that leads nowhere; a store that does not answer.
    pub fn exists(&self) -> Result<bool, CheckpointError> {
        match self.resolve()? {
            Resolved::Local(path) => Ok(path.symlink_metadata().is_ok()),
            #[cfg(feature = "object-store")]
            Resolved::Object(prefix) => Ok(prefix.head("")?.is_some() || !prefix.is_empty()?),
        }
    }

    /// The names of the entries directly in it, sorted: files, and directories or prefixes.
    ///
    /// # Errors
    /// As [`Location::exists`], and a directory that is not there.
    pub fn names(&self) -> Result<Vec<String>, CheckpointError> {
        match self.resolve()? {
            Resolved::Local(path) => crate::paths::names(path),
            #[cfg(feature = "object-store")]
            Resolved::Object(prefix) => prefix.names(),
        }
    }

    /// Whether there is a file or object here.
    ///
    /// # Errors
    /// As [`Location::exists`].
    pub fn is_file(&self) -> Result<bool, CheckpointError> {
        match self.resolve()? {
            Resolved::Local(path) => Ok(path.is_file()),
            #[cfg(feature = "object-store")]
            Resolved::Object(prefix) => Ok(prefix.head("")?.is_some()),
        }
    }

    /// How to get at it.
    pub(crate) fn resolve(&self) -> Result<Resolved<'_>, CheckpointError> {
        match &self.place {
            Place::Local => Ok(Resolved::Local(&self.name)),
            Place::Nowhere(source) => Err(CheckpointError::Location { path: self.name.clone(), source: *source }),
            #[cfg(feature = "object-store")]
            Place::Object(bucket, prefix) => {
                let store = bucket.store().map_err(CheckpointError::io("open", &self.name))?;
                Ok(Resolved::Object(Prefix::new(store, prefix.clone(), self.name.clone())))
            }
        }
    }
}

/// A location that can be read and written.
#[derive(Debug)]
pub(crate) enum Resolved<'l> {
    Local(&'l Path),
    #[cfg(feature = "object-store")]
    Object(Prefix),
}

/// Whether a text can be a key, or the end of one, of an object that a checkpoint has.
fn is_key(key: &str) -> bool {
    key.is_empty() || crate::paths::check_relative(key).is_ok()
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name.display().fmt(f)
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.name, f)
    }
}

// A location is what its name says.
impl PartialEq for Location {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
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
        self.name.cmp(&other.name)
    }
}

impl Hash for Location {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        path.to_str().and_then(|text| Self::of_url(text, Settings::new())).unwrap_or_else(|| Self::of_path(path))
    }
}

impl From<OsString> for Location {
    fn from(text: OsString) -> Self {
        PathBuf::from(text).into()
    }
}

impl From<&OsStr> for Location {
    fn from(text: &OsStr) -> Self {
        PathBuf::from(text).into()
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Self {
        path.to_owned().into()
    }
}

impl From<&PathBuf> for Location {
    fn from(path: &PathBuf) -> Self {
        path.clone().into()
    }
}

impl From<&str> for Location {
    fn from(text: &str) -> Self {
        PathBuf::from(text).into()
    }
}

impl From<String> for Location {
    fn from(text: String) -> Self {
        PathBuf::from(text).into()
    }
}

impl From<&String> for Location {
    fn from(text: &String) -> Self {
        PathBuf::from(text).into()
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
            assert_eq!(location.join("x").local(), Some(Path::new(path).join("x").as_path()));
        }
        assert_eq!(Location::from("file:///a/b").local(), Some(Path::new("/a/b")));
        assert_eq!(Location::from("file://localhost/a").local(), Some(Path::new("/a")));
        assert_eq!(Location::from("a").split().unwrap().0.local(), Some(Path::new(".")));
    }

    #[test]
    fn urls_that_lead_nowhere_say_why_and_keep_secrets() {
        for (url, reason, shown) in [
            ("ftp://h/x", LocationError::Scheme, "ftp://h/x"),
            ("file://host/x", LocationError::Host, "file://host/x"),
            ("s3:///x", LocationError::Host, "s3:///x"),
            ("s3://id:secret@b/x", LocationError::Credentials, "s3://b/x"),
            ("az://c/x?sig=secret", LocationError::Credentials, "az://c/x"),
            ("az://c?sig=secret/x", LocationError::Credentials, "az://c"),
            ("s3://b/a/../x", LocationError::Key, "s3://b/a/../x"),
            ("s3://b/a//x", LocationError::Key, "s3://b/a//x"),
        ] {
            let location = Location::from(url);
            assert_eq!((location.to_string().as_str(), location.local()), (shown, None));
            match location.resolve().unwrap_err() {
                CheckpointError::Location { source, path } => {
                    assert_eq!((source, path.as_path()), (reason, Path::new(shown)));
                }
                other => panic!("{url}: {other}"),
            }
            assert!(location.join("x").resolve().is_err());
        }
    }

    #[cfg(not(feature = "object-store"))]
    #[test]
    fn without_the_feature_the_error_says_how_to_build() {
        let error = crate::reader::CheckpointReader::open("s3://bucket/x").unwrap_err();
        assert!(matches!(error, CheckpointError::Location { source: LocationError::NotBuilt, .. }), "{error}");
        assert!(std::error::Error::source(&error).unwrap().to_string().contains("--features object-store"));
    }

    #[cfg(feature = "object-store")]
    #[test]
    fn prefixes_have_parents_and_children() {
        for url in ["s3://b/a/x", "s3://b/a/x/", "gs://b/a/x"] {
            let location = Location::from(url);
            let (parent, name) = location.split().unwrap();
            assert_eq!((name, parent.join("x")), ("x", location.clone()));
            assert!(matches!(&parent.place, Place::Object(_, key) if key == "a"));
            assert!(location.join("../y").resolve().is_err());
        }
        let bucket = Location::from("s3://b");
        assert!(matches!(&bucket.join("x").place, Place::Object(_, key) if key == "x"));
    }
}
