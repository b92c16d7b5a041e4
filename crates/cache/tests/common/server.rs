//! A server of one bucket that speaks as much of S3's protocol, and of WebDAV's, as the cache needs.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// How it treats requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    Well,
    /// Nothing may be changed.
    ReadOnly,
    /// It takes requests and never answers.
    Hanging,
    /// It answers the first requests of this number, then hangs.
    HangingAfter(u32),
    /// Error 500.
    Failing,
}

#[derive(Default)]
struct Shelf {
    objects: BTreeMap<String, Vec<u8>>,
    mood: Option<Mood>,
    requests: Vec<String>,
}

#[derive(Clone)]
pub(crate) struct Server {
    address: SocketAddr,
    shelf: Arc<Mutex<Shelf>>,
}

const DATE: &str = "Sat, 21 Nov 2026 09:00:00 GMT";
const ISO_DATE: &str = "2026-11-21T09:00:00.000Z";

impl Server {
    pub(crate) fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server { address: listener.local_addr().unwrap(), shelf: Arc::default() };
        let own = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let own = own.clone();
                std::thread::spawn(move || own.serve(stream));
            }
        });
        server
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn set(&self, mood: Mood) {
        self.shelf.lock().mood = Some(mood);
    }

    /// The names of objects after the last slash.
    pub(crate) fn names(&self) -> Vec<String> {
        self.shelf.lock().objects.keys().map(|k| k.rsplit('/').next().unwrap().to_owned()).collect()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut BTreeMap<String, Vec<u8>>)) {
        change(&mut self.shelf.lock().objects);
    }

    /// Methods and paths since the last call.
    pub(crate) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.shelf.lock().requests)
    }

    fn serve(&self, stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        let mut stream = stream;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|&n| n > 0)?;
            let (method, target) = line.split_once(' ')?;
            let target = target.split(' ').next()?.to_owned();
            let mut headers = BTreeMap::new();
            loop {
                let mut header = String::new();
                reader.read_line(&mut header).ok()?;
                let Some((name, value)) = header.trim().split_once(':') else { break };
                headers.insert(name.to_lowercase(), value.trim().to_owned());
            }
            let mut body = vec![0; headers.get("content-length").map_or(0, |n| n.parse().unwrap())];
            reader.read_exact(&mut body).ok()?;
            let mood = self.mood();
            self.shelf.lock().requests.push(format!("{method} {target}"));
            if mood == Mood::Hanging {
                std::thread::sleep(Duration::from_secs(600));
            }
            let (status, more, content) = match mood {
                Mood::Failing => (500, String::new(), Vec::new()),
                Mood::ReadOnly if !matches!(method, "GET" | "HEAD" | "PROPFIND") => {
                    (403, String::new(), b"<Error><Code>AccessDenied</Code></Error>".to_vec())
                }
                _ => self.answer(method, &target, &headers, body),
            };
            let length = content.len();
            let head = format!("HTTP/1.1 {status} -\r\ncontent-length: {length}\r\n{more}\r\n");
            stream.write_all(head.as_bytes()).ok()?;
            if method != "HEAD" {
                stream.write_all(&content).ok()?;
            }
        }
    }

    fn mood(&self) -> Mood {
        let mut shelf = self.shelf.lock();
        match shelf.mood {
            Some(Mood::HangingAfter(0)) => Mood::Hanging,
            Some(Mood::HangingAfter(n)) => {
                shelf.mood = Some(Mood::HangingAfter(n - 1));
                Mood::Well
            }
            mood => mood.unwrap_or(Mood::Well),
        }
    }

    fn answer(
        &self,
        method: &str,
        target: &str,
        headers: &BTreeMap<String, String>,
        body: Vec<u8>,
    ) -> (u32, String, Vec<u8>) {
        let objects = &mut self.shelf.lock().objects;
        let (key, query) = target.split_once('?').unwrap_or((target, ""));
        let nothing = |status| (status, String::new(), Vec::new());
        match method {
            "GET" if query.contains("list-type=2") => {
                let one = |(key, content): (&String, &Vec<u8>)| {
                    let key = key.trim_start_matches("/bucket/");
                    format!(
                        "<Contents><Key>{key}</Key><LastModified>{ISO_DATE}</LastModified><ETag>e</ETag><Size>{}</Size></Contents>",
                        content.len()
                    )
                };
                let all: String = objects.iter().map(one).collect();
                (200, String::new(), format!("<ListBucketResult>{all}</ListBucketResult>").into_bytes())
            }
            "GET" => {
                let Some(content) = objects.get(key) else { return nothing(404) };
                let mut more = format!("last-modified: {DATE}\r\netag: \"e\"\r\n");
                let range = headers.get("range").and_then(|r| r.strip_prefix("bytes=")?.split_once('-'));
                let Some((start, end)) = range else { return (200, more, content.clone()) };
                let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse().unwrap());
                let (end, len) = ((end + 1).min(content.len()), content.len());
                if start >= len {
                    return nothing(416);
                }
                more += &format!("content-range: bytes {start}-{}/{len}\r\n", end - 1);
                (206, more, content[start..end].to_vec())
            }
            "PUT" => {
                if headers.contains_key("if-none-match") && objects.contains_key(key) {
                    return nothing(412);
                }
                objects.insert(key.to_owned(), body);
                (200, "etag: \"e\"\r\n".to_owned(), Vec::new())
            }
            "DELETE" => nothing(if objects.remove(key).is_some() { 204 } else { 404 }),
            _ => nothing(501),
        }
    }
}
