//! Entries in an object store: S3, Google Cloud Storage, Azure Blob Storage, or plain HTTP.
//!
//! The cache asks and waits; the asking is done by one thread of its own, so that each wait has a bound and the end of the
//! process ends it.

use crate::entry;
use crate::store::{Store, Stored};
use futures_util::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, GetOptions, GetResult, ObjectStore, ObjectStoreExt,
    ObjectStoreScheme, PutMode, RetryConfig,
};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// How long a store may take to answer, and then to send more, before it counts as silent.
const ANSWER: Duration = Duration::from_secs(5);
/// Slower uplinks than this, in bytes per second, count as silent.
const SLOWEST: u64 = 256 << 10;
/// What is believed of a store that says how much it will send.
const RESERVED: u64 = 64 << 20;

/// An object store with a prefix of names.
///
/// It keeps no counts of uses: the age of an entry is the time since it was written.
pub struct Remote {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    place: String,
    answer: Duration,
    /// Whether the store can refuse to replace what is there. One that cannot is asked first, which is a race that compiles
    /// a program twice at worst.
    conditional: Arc<AtomicBool>,
    phase: watch::Sender<Phase>,
    thread: OnceLock<Option<mpsc::UnboundedSender<Job>>>,
}

type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How far the process has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Running,
    /// Nothing is read any more.
    Ending,
    Ended,
}

impl Remote {
    /// The store of a URL such as `s3://bucket/prefix`, with settings by the names that the environment has for them
    /// (`AWS_REGION`); other settings are ignored.
    pub fn open(url: &str, settings: &[(String, String)]) -> io::Result<Remote> {
        let parsed: url::Url = url.parse().map_err(|e| wrong(format!("`{url}` is not a URL: {e}")))?;
        let (scheme, prefix) = ObjectStoreScheme::parse(&parsed)
            .map_err(|_| wrong(format!("`{url}`: expected s3://, gs://, az://, https:// or a folder")))?;
        // The first one stays; whether it was ours does not matter.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let endpoint =
            |(name, value): &(String, String)| name.contains("ENDPOINT") && value.starts_with("http://");
        let plain = parsed.scheme() == "http" || settings.iter().any(endpoint);
        let client =
            ClientOptions::new().with_allow_http(plain).with_connect_timeout(ANSWER).with_timeout_disabled(); // bounded here, by how much is sent
        let retry = RetryConfig {
            backoff: BackoffConfig { init_backoff: Duration::from_millis(100), ..BackoffConfig::default() },
            max_retries: 2,
            retry_timeout: ANSWER,
        };
        macro_rules! build {
            ($new:expr, $prefixes:expr) => {{
                let new = $new.with_url(url).with_client_options(client).with_retry(retry);
                let known = settings.iter().filter(|(name, _)| $prefixes.iter().any(|p| name.starts_with(p)));
                let set = known.fold(new, |builder, (name, value)| match name.to_lowercase().parse() {
                    Ok(key) => builder.with_config(key, value),
                    Err(_) => builder,
                });
                set.build().map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
            }};
        }
        let built = match scheme {
            // One is deleted at a time, and not every server of this protocol can do several.
            ObjectStoreScheme::AmazonS3 => {
                build!(AmazonS3Builder::new().with_disable_bulk_delete(true), ["AWS_"])
            }
            ObjectStoreScheme::GoogleCloudStorage => build!(GoogleCloudStorageBuilder::new(), ["GOOGLE_"]),
            ObjectStoreScheme::MicrosoftAzure => build!(MicrosoftAzureBuilder::new(), ["AZURE_"]),
            ObjectStoreScheme::Http => HttpBuilder::new()
                .with_url(&parsed[..url::Position::BeforePath])
                .with_client_options(client)
                .with_retry(retry)
                .build()
                .map(|store| Arc::new(store) as Arc<dyn ObjectStore>),
            _ => return Err(wrong(format!("`{url}`: expected s3://, gs://, az://, https:// or a folder"))),
        };
        let objects = built.map_err(|e| wrong(format!("`{}`: {}", shown(&parsed), brief(&e))))?;
        Ok(Remote { place: shown(&parsed), ..Remote::new(objects, &prefix) })
    }

    /// The entries of a cache whose names start with `prefix`.
    pub fn new(objects: Arc<dyn ObjectStore>, prefix: &Path) -> Remote {
        let prefix = format!("{prefix}/programs/v{}", entry::FORMAT);
        Remote {
            place: objects.to_string(),
            objects,
            prefix: Path::from(prefix.trim_start_matches('/')),
            answer: ANSWER,
            conditional: Arc::new(AtomicBool::new(true)),
            phase: watch::Sender::new(Phase::Running),
            thread: OnceLock::new(),
        }
    }

    /// Where it is, without what is secret in a URL.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Another bound for each wait than five seconds.
    pub fn answering_within(self, answer: Duration) -> Remote {
        Remote { answer, ..self }
    }

    fn path(&self, name: &str) -> Path {
        self.prefix.clone().join(name)
    }

    /// Lets the thread do something and waits for the result, or until the process has come to this phase.
    fn wait<T: Send + 'static>(
        &self,
        until: Phase,
        work: impl Future<Output = io::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let gone = || io::Error::other("there is no thread for the network");
        let thread = self.thread.get_or_init(start).as_ref().ok_or_else(gone)?;
        let (answer, answered) = std::sync::mpsc::sync_channel(1);
        let mut phase = self.phase.subscribe();
        let job = async move {
            let ended = phase.wait_for(|&now| now >= until);
            let result = tokio::select! {
                biased;
                _ = ended => Err(io::Error::new(ErrorKind::Interrupted, "the process ends")),
                result = work => result,
            };
            let _ = answer.send(result); // whoever waits is there
        };
        thread.send(Box::pin(job)).map_err(|_| gone())?;
        answered.recv().unwrap_or_else(|_| Err(gone()))
    }

    fn put(&self, name: &str, content: &[u8], mode: PutMode) -> io::Result<Result<(), Error>> {
        let (objects, path, content) = (self.objects.clone(), self.path(name), content.to_vec());
        let limit = self.answer + Duration::from_secs(content.len() as u64 / SLOWEST);
        self.wait(Phase::Ended, async move {
            let put = within(limit, objects.put_opts(&path, content.into(), mode.into())).await?;
            Ok(put.map(|_| ()))
        })
    }
}

/// The thread that talks to a store; none if there can be none.
fn start() -> Option<mpsc::UnboundedSender<Job>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let (jobs, mut queue) = mpsc::unbounded_channel::<Job>();
    let work = move || {
        runtime.block_on(async {
            while let Some(job) = queue.recv().await {
                tokio::spawn(job);
            }
        });
        runtime.shutdown_background(); // a name that is being resolved is not waited for
    };
    std::thread::Builder::new().name("oxi-remote".into()).spawn(work).ok().map(|_| jobs)
}

async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> io::Result<T> {
    tokio::time::timeout(limit, work).await.map_err(|_| {
        io::Error::new(ErrorKind::TimedOut, format!("no answer within {:.3} s", limit.as_secs_f64()))
    })
}

/// The object, none if there is none.
fn found<T>(result: Result<T, Error>) -> io::Result<Option<T>> {
    match result {
        Ok(x) => Ok(Some(x)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(e) => Err(error(&e)),
    }
}

async fn content(result: GetResult, answer: Duration) -> io::Result<Vec<u8>> {
    let size = result.range.end - result.range.start;
    let mut out = Vec::with_capacity(size.min(RESERVED) as usize);
    let mut chunks = result.into_stream();
    while let Some(chunk) = within(answer, chunks.next()).await? {
        out.extend_from_slice(&chunk.map_err(|e| error(&e))?);
    }
    Ok(out)
}

fn error(e: &Error) -> io::Error {
    let kind = match e {
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => ErrorKind::PermissionDenied,
        Error::NotSupported { .. } | Error::NotImplemented { .. } => ErrorKind::Unsupported,
        _ => ErrorKind::Other,
    };
    io::Error::new(kind, brief(e))
}

fn wrong(text: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, text)
}

/// Longer answers of a server are cut.
const BRIEF: usize = 200;

/// The innermost reason: what is around it says which request of which retry it was.
fn brief(e: &Error) -> String {
    let mut inner: &dyn std::error::Error = e;
    while let Some(source) = inner.source() {
        inner = source;
    }
    let text = inner.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(BRIEF) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// A URL without passwords, and without its query, which may hold a key.
fn shown(url: &url::Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    if url.password().is_some() {
        // A URL that has a password can have none.
        let _ = url.set_password(None);
    }
    url.to_string().trim_end_matches('/').to_owned()
}

impl Store for Remote {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let (objects, path, answer) = (self.objects.clone(), self.path(name), self.answer);
        self.wait(Phase::Ending, async move {
            match found(within(answer, objects.get(&path)).await?)? {
                Some(result) => content(result, answer).await.map(Some),
                None => Ok(None),
            }
        })
    }

    fn read_start(&self, name: &str, len: usize) -> io::Result<Option<(Vec<u8>, u64)>> {
        let (objects, path, answer) = (self.objects.clone(), self.path(name), self.answer);
        let part = self.wait(Phase::Ending, async move {
            let options = GetOptions::new().with_range(Some(0..len as u64));
            match found(within(answer, objects.get_opts(&path, options)).await?)? {
                Some(result) => {
                    let size = result.meta.size;
                    content(result, answer).await.map(|start| Some((start, size)))
                }
                None => Ok(None),
            }
        });
        match part {
            Ok(part) => Ok(part),
            Err(e) if matches!(e.kind(), ErrorKind::TimedOut | ErrorKind::Interrupted) => Err(e),
            // An empty object has no range, and some servers know none.
            Err(_) => Ok(self.read(name)?.map(|all| {
                let size = all.len() as u64;
                (all, size)
            })),
        }
    }

    fn publish(&self, name: &str, content: &[u8]) -> io::Result<()> {
        self.put(name, content, PutMode::Overwrite)?.map_err(|e| error(&e))
    }

    fn create(&self, name: &str, content: &[u8]) -> io::Result<bool> {
        if self.conditional.load(Relaxed) {
            match self.put(name, content, PutMode::Create)? {
                Ok(()) => return Ok(true),
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => return Ok(false),
                Err(Error::NotImplemented { .. } | Error::NotSupported { .. }) => {
                    self.conditional.store(false, Relaxed);
                }
                Err(e) => return Err(error(&e)),
            }
        }
        if self.read(name)?.is_some() {
            return Ok(false);
        }
        self.publish(name, content).map(|()| true)
    }

    fn remove(&self, name: &str) -> io::Result<bool> {
        let (objects, path, answer) = (self.objects.clone(), self.path(name), self.answer);
        self.wait(
            Phase::Ended,
            async move { Ok(found(within(answer, objects.delete(&path)).await?)?.is_some()) },
        )
    }

    fn list(&self) -> io::Result<Vec<Stored>> {
        let (prefix, answer) = (self.prefix.clone(), self.answer);
        let mut objects = self.objects.list(Some(&prefix));
        self.wait(Phase::Ending, async move {
            let mut out = Vec::new();
            while let Some(object) = within(answer, objects.next()).await? {
                let Some(object) = found(object)? else { return Ok(out) }; // nothing was written yet
                if let (Some(name), true) =
                    (object.location.filename(), object.location.prefix_matches(&prefix))
                {
                    let modified = object.last_modified.into();
                    out.push(Stored { name: name.to_owned(), size: object.size, modified });
                }
            }
            Ok(out)
        })
    }

    fn used(&self, _name: &str) {}

    fn clean(&self) {}

    fn is_remote(&self) -> bool {
        true
    }

    fn end_reading(&self) {
        self.phase.send_replace(Phase::Ending);
    }

    fn close(&self) {
        self.phase.send_replace(Phase::Ended);
    }
}
