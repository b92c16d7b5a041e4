//! Whose files are read: entries are code, so whoever can write one, or put another in its place, runs it as the user that
//! reads it.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::LazyLock;

/// Write permission of the group and of others.
const OF_OTHERS: u32 = 0o022;

/// The user that this process acts as; none where the kernel does not say.
static USER: LazyLock<Option<u32>> = LazyLock::new(|| {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("Uid:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
});

/// Whether nobody but this user and the administrator can write it.
fn is_private(meta: &Metadata) -> bool {
    let own = USER.is_none_or(|user| meta.uid() == user || meta.uid() == 0);
    own && meta.mode() & OF_OTHERS == 0
}

/// An error that says what to do if somebody else can write to this folder. None that is not there.
pub(crate) fn check_private(folder: &Path) -> io::Result<()> {
    let meta = match fs::metadata(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if is_private(&meta) {
        return Ok(());
    }
    let place = folder.display();
    let why = if meta.mode() & OF_OTHERS != 0 {
        format!("other users may write to {place} (mode {:o}): `chmod go-w {place}`", meta.mode() & 0o7777)
    } else {
        format!("{place} belongs to user {}", meta.uid())
    };
    let text = format!("{why}, or set OXITORCH_CACHE_DIR to a folder of your own; what is in it runs as you");
    Err(io::Error::new(ErrorKind::PermissionDenied, text))
}

/// An error if everybody may write to this folder.
pub(crate) fn check_not_public(folder: &Path) -> io::Result<()> {
    match fs::metadata(folder) {
        Ok(meta) if meta.mode() & 0o002 != 0 => {
            let place = folder.display();
            let text = format!(
                "everybody may write to {place}, and what is in it runs as its reader: `chmod o-w {place}`"
            );
            Err(io::Error::new(ErrorKind::PermissionDenied, text))
        }
        _ => Ok(()),
    }
}

/// Makes a folder and those above it that are missing, for this user alone, whatever the umask.
pub(crate) fn make_private(folder: &Path) -> io::Result<()> {
    if let Some(above) = folder.parent().filter(|above| !above.as_os_str().is_empty() && !above.exists()) {
        make_private(above)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(0o700)),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
    }
}

/// A new file, for this user alone if it is `private`, whatever the umask.
pub(crate) fn create_new(path: &Path, private: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    if !private {
        return options.open(path);
    }
    let file = options.mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

/// Opens a regular file without following a link, and without waiting for whoever is at the other end of what is none;
/// nothing for anything else, and for a `private` one that others can write.
pub(crate) fn open(path: &Path, options: &mut OpenOptions, private: bool) -> io::Result<Option<File>> {
    // A device may do something when it is opened, and a socket cannot be.
    if !fs::symlink_metadata(path)?.is_file() {
        return Ok(None);
    }
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
    let meta = file.metadata()?;
    Ok((meta.is_file() && (!private || is_private(&meta))).then_some(file))
}

/// What a file holds; nothing where [`open`] gives nothing.
pub(crate) fn read(path: &Path, private: bool) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    if let Some(mut file) = open(path, OpenOptions::new().read(true), private)? {
        out.reserve(file.metadata()?.size() as usize);
        file.read_to_end(&mut out)?;
    }
    Ok(out)
}
