//! From a URL to a store's client, with settings and credentials from the environment.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ClientOptions, Error, RetryConfig};

use super::{Store, io_error};

/// Attempts after the first one, with pauses that grow.
const RETRIES: usize = 8;
/// No attempt starts later than this after the first one.
const RETRY_FOR: Duration = Duration::from_secs(120);
/// One attempt may take this long: a part of an upload over a slow line.
const TIMEOUT: Duration = Duration::from_secs(120);
/// So may connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// A bucket or container. Its client is made when it is first needed, and shared by all locations in it.
pub(crate) struct Bucket {
    /// Scheme and name, if it came from a URL.
    url: (String, String),
    /// Come before those of the environment.
    settings: Vec<(String, String)>,
    store: Mutex<Option<Arc<dyn Store>>>,
}

impl Bucket {
    pub(crate) fn of_url(scheme: &str, bucket: &str, settings: Vec<(String, String)>) -> Self {
        Bucket { url: (scheme.to_owned(), bucket.to_owned()), settings, store: Mutex::default() }
    }

    /// One that the caller has set up.
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Bucket { url: Default::default(), settings: Vec::new(), store: Mutex::new(Some(store)) }
    }

    pub(crate) fn store(&self) -> io::Result<Arc<dyn Store>> {
        let mut store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = &*store {
            return Ok(store.clone());
        }
        let made = self.connect().map_err(io_error)?;
        Ok(store.insert(made).clone())
    }

    /// Makes a client; nothing is asked of the store yet.
    fn connect(&self) -> object_store::Result<Arc<dyn Store>> {
        // For TLS; whoever has chosen another provider keeps it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig { max_retries: RETRIES, retry_timeout: RETRY_FOR, ..RetryConfig::default() };
        let options = ClientOptions::new().with_timeout(TIMEOUT).with_connect_timeout(CONNECT_TIMEOUT);
        let (scheme, bucket) = &self.url;
        let mut settings = self.settings.iter();
        Ok(match scheme.as_str() {
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
                let builder = builder.with_client_options(options).with_retry(retry);
                let set = |builder: GoogleCloudStorageBuilder, (key, value): &(String, String)| {
                    Ok::<_, Error>(builder.with_config(key.parse()?, value))
                };
                Arc::new(settings.try_fold(builder, set)?.build()?)
            }
            "az" => {
                let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
                let builder = builder.with_client_options(options).with_retry(retry);
                let set = |builder: MicrosoftAzureBuilder, (key, value): &(String, String)| {
                    Ok::<_, Error>(builder.with_config(key.parse()?, value))
                };
                Arc::new(settings.try_fold(builder, set)?.build()?)
            }
            _ => {
                let builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry);
                let set = |builder: AmazonS3Builder, (key, value): &(String, String)| {
                    Ok::<_, Error>(builder.with_config(key.parse()?, value))
                };
                let builder = settings.try_fold(builder, set)?;
                // Whoever names an endpoint without TLS means it.
                let plain = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
                let plain = plain.is_some_and(|endpoint| endpoint.starts_with("http://"));
                Arc::new(builder.with_client_options(options.with_allow_http(plain)).build()?)
            }
        })
    }
}
