//! Archives in the format a kernel unpacks as its first file system: "newc" of cpio.

use std::collections::BTreeSet;

/// Mode bits of what is put in.
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
/// The name that ends an archive.
const TRAILER: &str = "TRAILER!!!";

/// An archive under construction. Folders above a file come by themselves.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    names: BTreeSet<String>,
}

impl Archive {
    /// Adds an executable file at an absolute path; the first one at a path stays.
    ///
    /// # Errors
    /// The file is longer than the format can say.
    pub(super) fn file(&mut self, path: &str, contents: &[u8]) -> anyhow::Result<()> {
        self.add(path, PROGRAM, contents)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// None for links of a sensible length.
    pub(super) fn link(&mut self, path: &str, to: &str) -> anyhow::Result<()> {
        self.add(path, LINK, to.as_bytes())
    }

    /// Adds an empty folder.
    ///
    /// # Errors
    /// None is.
    pub(super) fn folder(&mut self, path: &str) -> anyhow::Result<()> {
        self.add(path, FOLDER, &[])
    }

    fn add(&mut self, path: &str, mode: u32, contents: &[u8]) -> anyhow::Result<()> {
        let name = path.trim_matches('/');
        if let Some((above, _)) = name.rsplit_once('/')
            && !self.names.contains(above)
        {
            self.folder(above)?;
        }
        if self.names.insert(name.to_owned()) {
            self.record(name, mode, contents)?;
        }
        Ok(())
    }

    /// The archive, ended.
    ///
    /// # Errors
    /// None is.
    pub(super) fn finish(mut self) -> anyhow::Result<Vec<u8>> {
        self.record(TRAILER, 0, &[])?;
        Ok(self.bytes)
    }

    /// A head of 13 fields of 8 hexadecimal digits, the name with its zero, the contents; both padded to 4 bytes.
    fn record(&mut self, name: &str, mode: u32, contents: &[u8]) -> anyhow::Result<()> {
        self.entries += 1;
        let length = u32::try_from(contents.len())?;
        let name_length = u32::try_from(name.len() + 1)?;
        let fields = [
            self.entries, // inode
            mode,
            0, // user
            0, // group
            1, // links
            0, // time of change
            length,
            0, // device, major
            0, // device, minor
            0, // of a device node, major
            0, // of a device node, minor
            name_length,
            0, // checksum, unused in this variant
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        let whole = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(whole, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_has_folders_before_files_and_everything_on_four_bytes() {
        let mut archive = Archive::default();
        archive.file("/bin/sub/tool", b"12345").unwrap();
        archive.file("/bin/sub/tool", b"again").unwrap();
        archive.link("/init", "bin/sub/tool").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let mut names = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let field = |number: usize| {
                let from = at + 6 + number * 8;
                let text = std::str::from_utf8(&bytes[from..from + 8]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (length, name_length) = (field(6), field(11));
            let name = at + 110;
            names.push(String::from_utf8(bytes[name..name + name_length - 1].to_vec()).unwrap());
            let contents = (name + name_length).next_multiple_of(4);
            at = (contents + length).next_multiple_of(4);
        }
        assert_eq!(names, ["bin", "bin/sub", "bin/sub/tool", "init", TRAILER]);
    }
}
