import os, pytest, itertools
from deltackpt.store.fsspec_store import open_fsspec
from deltackpt.store.azure import AzureDriver, options
from deltackpt.store.remote import RemoteStore
from tests.store.conftest import QUICK
from tests.store_contract import StoreContract
N=itertools.count()
CONN="DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;BlobEndpoint=http://127.0.0.1:11000/devstoreaccount1;"
@pytest.fixture(scope="session")
def fs():
    import adlfs
    f=adlfs.AzureBlobFileSystem(connection_string=CONN, skip_instance_cache=True, **options(QUICK))
    try: f.mkdir("box")
    except Exception as e: print(e)
    return f
class TestAzure(StoreContract):
    @pytest.fixture
    def store(self, fs):
        r=f"runs/{next(N)}"
        return RemoteStore(AzureDriver(fs,"box"), f"az://box/{r}", r, patience=QUICK, part=1<<20)
