//! Modules of a kernel: the wanted ones and their dependencies, in loading order.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use walkdir::WalkDir;

/// A module and its unpacked code.
pub(super) struct Module {
    /// Name as in `lsmod`.
    pub(super) name: String,
    /// The object file.
    pub(super) code: Vec<u8>,
}

/// The modules with these names and their dependencies. A module without a file is built in or missing, which the dependent
/// features then show.
///
/// # Errors
/// The folder cannot be read, or a module cannot be unpacked.
pub(super) fn wanted(folder: &Path, names: &[&str]) -> anyhow::Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    for entry in WalkDir::new(folder) {
        let entry = entry.with_context(|| format!("list {}", folder.display()))?;
        if let Some((module, _)) = entry.file_name().to_string_lossy().split_once(".ko") {
            files.insert(module.replace('-', "_"), entry.into_path());
        }
    }
    let mut done = Vec::new();
    for name in names {
        load(name, &files, &mut done)?;
    }
    Ok(done)
}

/// Adds a module after its dependencies.
fn load(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    done: &mut Vec<Module>,
) -> anyhow::Result<()> {
    if done.iter().any(|module| module.name == name) {
        return Ok(());
    }
    let Some(path) = files.get(name) else {
        return Ok(());
    };
    let code = unpacked(path)?;
    for needed in depends(&code) {
        load(&needed, files, done)?;
    }
    done.push(Module {
        name: name.to_owned(),
        code,
    });
    Ok(())
}

fn unpacked(path: &Path) -> anyhow::Result<Vec<u8>> {
    let tool = match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return Ok(fs::read(path)?),
    };
    let out = Command::new(tool).arg("-dc").arg(path).output();
    let out = out.with_context(|| format!("{tool} is needed to unpack {}", path.display()))?;
    ensure!(
        out.status.success(),
        "{tool} could not unpack {}",
        path.display()
    );
    Ok(out.stdout)
}

/// Dependencies in the module's own description: `depends=a,b` between zero bytes.
fn depends(code: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = code.windows(key.len()).position(|bytes| bytes == key) else {
        return Vec::new();
    };
    let rest = code.get(at + key.len()..).unwrap_or_default();
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(0);
    let names = String::from_utf8_lossy(rest.get(..end).unwrap_or_default()).into_owned();
    names
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_listed_once_after_their_dependencies() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, depends: &str| {
            let text = format!("ELF\0license=GPL\0depends={depends}\0name=x\0");
            fs::write(folder.path().join(name), text).unwrap();
        };
        fs::create_dir(folder.path().join("net")).unwrap();
        write("net/tcp-diag.ko", "inet_diag");
        write("inet_diag.ko", "");
        write("tls.ko", "");
        let modules = wanted(folder.path(), &["tcp_diag", "inet_diag", "absent", "tls"]).unwrap();
        let names: Vec<&str> = modules.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["inet_diag", "tcp_diag", "tls"]);
    }
}
