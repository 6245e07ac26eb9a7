//! From a URL to a store's client, with settings and credentials from the environment.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ClientOptions, RetryConfig};

use super::prefix::Store;
use super::runtime::io_error;
use crate::threads::lock;

/// Attempts after the first one, with growing pauses between them.
const RETRIES: usize = 8;
/// The time after which no further attempt starts.
const RETRY_FOR: Duration = Duration::from_secs(120);
/// The time for one attempt: enough for a part of an upload over a slow line.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The time for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// A bucket or container. Its client is made when it is first needed, and shared by all locations
/// in it.
pub(crate) struct Bucket {
    /// Scheme and name; empty for a bucket that has its store already.
    url: (String, String),
    /// Settings that come before those of the environment.
    settings: Vec<(String, String)>,
    store: Mutex<Option<Arc<dyn Store>>>,
}

impl Bucket {
    pub(crate) fn from_url(scheme: &str, bucket: &str, settings: Vec<(String, String)>) -> Self {
        Bucket {
            url: (scheme.to_owned(), bucket.to_owned()),
            settings,
            store: Mutex::default(),
        }
    }

    /// Makes a bucket of a store that the caller has set up.
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Bucket {
            url: Default::default(),
            settings: Vec::new(),
            store: Mutex::new(Some(store)),
        }
    }

    /// Returns the client, which the first call makes.
    pub(super) fn store(&self) -> io::Result<Arc<dyn Store>> {
        let mut store = lock(&self.store);
        if let Some(store) = &*store {
            return Ok(store.clone());
        }
        let made = self.connect().map_err(io_error)?;
        Ok(store.insert(made).clone())
    }

    /// Makes a client. Nothing is asked of the store yet.
    fn connect(&self) -> object_store::Result<Arc<dyn Store>> {
        // TLS needs a provider of cryptography. This fails, and changes nothing, where the program
        // has chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig {
            max_retries: RETRIES,
            retry_timeout: RETRY_FOR,
            ..RetryConfig::default()
        };
        let options = ClientOptions::new()
            .with_timeout(TIMEOUT)
            .with_connect_timeout(CONNECT_TIMEOUT);
        let (scheme, bucket) = &self.url;
        Ok(match scheme.as_str() {
            "gs" => {
                let mut builder = GoogleCloudStorageBuilder::from_env()
                    .with_bucket_name(bucket)
                    .with_client_options(options)
                    .with_retry(retry);
                for (key, value) in &self.settings {
                    builder = builder.with_config(key.parse()?, value);
                }
                Arc::new(builder.build()?)
            }
            "az" => {
                let mut builder = MicrosoftAzureBuilder::from_env()
                    .with_container_name(bucket)
                    .with_client_options(options)
                    .with_retry(retry);
                for (key, value) in &self.settings {
                    builder = builder.with_config(key.parse()?, value);
                }
                Arc::new(builder.build()?)
            }
            "s3" => {
                let mut builder = AmazonS3Builder::from_env()
                    .with_bucket_name(bucket)
                    .with_retry(retry);
                for (key, value) in &self.settings {
                    builder = builder.with_config(key.parse()?, value);
                }
                // An endpoint that is given as `http://` is meant to be used without TLS.
                let is_plain = builder
                    .get_config_value(&AmazonS3ConfigKey::Endpoint)
                    .is_some_and(|endpoint| endpoint.starts_with("http://"));
                Arc::new(
                    builder
                        .with_client_options(options.with_allow_http(is_plain))
                        .build()?,
                )
            }
            _ => unreachable!("a location makes buckets of known schemes only"),
        })
    }
}
