use std::fmt;

/// The version of a UCX library, ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Major number; 1 in every UCX that this crate knows.
    pub major: u32,
    /// Minor number: grows with each feature release.
    pub minor: u32,
    /// Release number: 0 in the first release of a minor version.
    pub release: u32,
}

impl Version {
    /// `major.minor.release`.
    pub const fn new(major: u32, minor: u32, release: u32) -> Self {
        Self { major, minor, release }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

#[cfg(test)]
mod tests {
    use super::Version;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(Version::new(1, 9, 0) < Version::new(1, 13, 0));
        assert!(Version::new(1, 13, 1) > Version::new(1, 13, 0));
        assert_eq!(Version::new(1, 22, 0).to_string(), "1.22.0");
    }
}
