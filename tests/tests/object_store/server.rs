//! An S3 server of this process, on a directory of its own.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp::formats::Location;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, HttpRequest};
use s3s_fs::FileSystem;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

pub(crate) const BUCKET: &str = "bucket";
pub(crate) const KEY_ID: &str = "id";
pub(crate) const SECRET: &str = "secret-of-the-test";

/// The requests to the server so far, and the faults that it adds to its answers.
#[derive(Default)]
pub(crate) struct Behaviour {
    /// Method, key, and range of each request.
    pub(crate) requests: Mutex<Vec<String>>,
    /// The next conditional PUT is done, but its answer is an error.
    pub(crate) lose_an_answer: AtomicBool,
    /// The next PUT is refused as too many.
    pub(crate) slow_down: AtomicBool,
}

pub(crate) struct Server {
    directory: TempDir,
    address: SocketAddr,
    pub(crate) behaviour: Arc<Behaviour>,
    _runtime: Runtime,
}

/// The server's own service, made to do what S3 promises and s3s-fs does not.
struct Front {
    service: S3Service,
    root: std::path::PathBuf,
    /// The lock of conditional PUTs, of which one comes first.
    conditional: tokio::sync::Mutex<()>,
    behaviour: Arc<Behaviour>,
}

impl Front {
    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let request: HttpRequest = request.map(Body::from);
        let is_put = request.method() == Method::PUT;
        let is_conditional = request.headers().contains_key("if-none-match");
        let key = request.uri().path().trim_start_matches('/').to_owned();
        let range = request
            .headers()
            .get("range")
            .and_then(|range| range.to_str().ok())
            .unwrap_or_default();
        let line = format!("{} {key} {range}", request.method());
        self.behaviour
            .requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line);
        let only = |status: StatusCode| {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = status;
            Ok(response)
        };
        // Directories are no objects.
        let reads = [Method::GET, Method::HEAD].contains(request.method());
        if reads && key != BUCKET && self.root.join(&key).is_dir() {
            return only(StatusCode::NOT_FOUND);
        }
        if is_put && self.behaviour.slow_down.swap(false, Ordering::SeqCst) {
            return only(StatusCode::SERVICE_UNAVAILABLE);
        }
        let _first = match is_conditional {
            true => Some(self.conditional.lock().await),
            false => None,
        };
        let answer = self.service.call(request).await;
        if is_conditional && self.behaviour.lose_an_answer.swap(false, Ordering::SeqCst) {
            return only(StatusCode::INTERNAL_SERVER_ERROR);
        }
        match answer {
            Ok(answer) => Ok(answer),
            Err(_) => only(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }
}

impl Server {
    pub(crate) fn start() -> Self {
        let directory = TempDir::new().unwrap();
        std::fs::create_dir(directory.path().join(BUCKET)).unwrap();
        let mut service = S3ServiceBuilder::new(FileSystem::new(directory.path()).unwrap());
        service.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        let behaviour = Arc::new(Behaviour::default());
        let front = Arc::new(Front {
            service: service.build(),
            root: directory.path().to_owned(),
            conditional: tokio::sync::Mutex::default(),
            behaviour: behaviour.clone(),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime
            .block_on(TcpListener::bind(("127.0.0.1", 0)))
            .unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                // A head and its body go at once, instead of waiting for each other's
                // acknowledgement.
                socket.set_nodelay(true).unwrap();
                let front = front.clone();
                let service = service_fn(move |request| {
                    let front = front.clone();
                    async move { front.answer(request).await }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(socket), service),
                );
            }
        });
        Server {
            directory,
            address,
            behaviour,
            _runtime: runtime,
        }
    }

    /// Returns the variables with which programs find it.
    pub(crate) fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("AWS_ENDPOINT_URL", format!("http://{}", self.address)),
            ("AWS_ACCESS_KEY_ID", KEY_ID.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ]
    }

    pub(crate) fn location(&self, prefix: &str) -> Location {
        let settings = self
            .environment()
            .map(|(key, value)| (key.to_ascii_lowercase(), value));
        Location::with_settings(&format!("s3://{BUCKET}/{prefix}"), settings)
    }

    /// Uploads that were begun, and neither completed nor aborted.
    pub(crate) fn unfinished(&self) -> usize {
        let names = std::fs::read_dir(self.directory.path()).unwrap();
        names
            .filter(|entry| {
                entry
                    .as_ref()
                    .unwrap()
                    .file_name()
                    .to_string_lossy()
                    .starts_with(".upload")
            })
            .count()
    }
}
