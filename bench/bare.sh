# For a machine with a GPU and without a network: source this in the root of the tree. Wheels of what is missing there
# (msgspec: python3 -m pip download --no-deps -d .whl msgspec) lie in .whl. Needs no setuptools and no writable environment; every process started behind it finds ftcomm.
S=${TMPDIR:-/var/tmp}/site
for whl in .whl/*.whl; do # a wheel is a zip, so pip need not be there either; none lie there if nothing is missing
    [ ! -e "$whl" ] || python3 -m zipfile -e "$whl" $S || return 1
done
mkdir -p $S/ftcomm-0.2.0.dist-info # `bench` asks for the version
printf 'Metadata-Version: 2.1\nName: ftcomm\nVersion: 0.2.0\n' >$S/ftcomm-0.2.0.dist-info/METADATA
cat >$S/sitecustomize.py <<E
import importlib.util, sys
class Tree: # what the editable install of setuptools does
    def find_spec(name, path=None, target=None):
        at = {"ftcomm": "ftcomm", "ftcomm.bench": "bench", "ftcomm.control": "control", "ftcomm.kernels": "kernels"}.get(name)
        return at and importlib.util.spec_from_file_location(
            name, f"$PWD/{at}/__init__.py", submodule_search_locations=[f"$PWD/{at}"])
sys.meta_path.append(Tree)
E
export PYTHONPATH=$S PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=32
python3 -c 'import ftcomm.bench.gpu_check as g; assert g._TESTS.exists(), g._TESTS' || return 1
